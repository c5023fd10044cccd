"""PaliGemma and ShieldGemma 2: a SigLIP tower and one matrix to the width of a Gemma model.

Source: transformers ``models/paligemma/modeling_paligemma.py``, ``models/gemma3/modeling_gemma3.py``,
``models/shieldgemma2/modeling_shieldgemma2.py``.
"""

from __future__ import annotations

from tpshard.composite import MODEL, include_language, include_tower, language_config, whole_projector
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "paligemma"
MODEL_TYPES = ("paligemma", "shieldgemma2")


def table(c: Config) -> Table:
    shield = c.model_type == "shieldgemma2"
    text = language_config(c, "text_config", model_type="gemma3_text" if shield else "gemma", tied=True)
    tower = part_of(c, "vision_config", model_type="siglip_vision_model")
    hidden, width = text.count("hidden_size"), tower.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    if shield:
        name = "@multi_modal_projector.mm_input_projection_weight"  # input x output
        t.whole(name, width, hidden, why="a projector of one matrix: a cut would need a gather of all it makes")
        t.norm("@multi_modal_projector.mm_soft_emb_norm", width)
    else:
        whole_projector(t, "@multi_modal_projector.linear", width, hidden)
    return t
