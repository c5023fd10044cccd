"""InternVL: its own tower, patches joined and normalised, two matrices, a language model.

Source: transformers ``models/internvl/modeling_internvl.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, input_norm, language_config, projector
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "internvl"
MODEL_TYPES = ("internvl",)


def table(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="qwen2", tied=True)
    tower = part_of(c, "vision_config", model_type="internvl_vision")
    ratio = c.get("downsample_ratio", default=0.5)
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise DamagedError(f"config.json: 'downsample_ratio' is {ratio!r:.80}, not a number up to 1; correct it")
    hidden, joined = text.count("hidden_size"), tower.count("hidden_size") * int(1 / ratio) ** 2

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    input_norm(t, "@multi_modal_projector.layer_norm", joined)
    projector(t, "@multi_modal_projector", joined, hidden, hidden)
    return t
