"""Gemma 3n with images and sounds: a MobileNet, a conformer, and for each an embedding of its own tokens.

Both towers run once, before the model, and are small beside it.
Source: transformers ``models/gemma3n/modeling_gemma3n.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, language_config
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "gemma3n_multimodal"
MODEL_TYPES = ("gemma3n",)
ONE_MATRIX = "one small matrix: a cut would need a gather of all that it makes"
TOWERS = {  # what they make, in channels, where the config does not say
    "vision": {"hidden_size": 2048, "vocab_size": 128},
    "audio": {"hidden_size": 1536, "vocab_size": 128},
}


def table(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="gemma3n_text", tied=True)
    hidden, t = text.count("hidden_size"), Table(0, prefixes=MODEL)
    include_language(t, text)
    for sense, usual in TOWERS.items():
        if c.get(f"{sense}_config") is None:
            continue
        tower, at = c.nested(f"{sense}_config", **usual), f"@embed_{sense}"
        width = tower.count("hidden_size")
        t.whole_module(f"@{sense}_tower", why="convolutions that run once before the model")
        t.whole(f"{at}.embedding.weight", tower.count("vocab_size"), width, why="a few tokens that mark a place")
        t.whole(f"{at}.embedding_projection.weight", hidden, width, why=ONE_MATRIX)
        t.norm(f"{at}.hard_embedding_norm", width)
        t.norm(f"{at}.soft_embedding_norm", width)
    return t
