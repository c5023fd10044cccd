"""PaliGemma, Gemma 3 with images and ShieldGemma 2: a SigLIP tower and one matrix to the width of a Gemma model.

Source: transformers ``models/{paligemma,gemma3,shieldgemma2}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import (
    MODEL,
    include_language,
    include_tower,
    input_norm,
    language_config,
    whole_projector,
)
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "paligemma"
MODEL_TYPES = ("gemma3", "paligemma", "shieldgemma2")


def table(c: Config) -> Table:
    first = c.model_type == "paligemma"
    text = language_config(c, "text_config", model_type="gemma" if first else "gemma3_text", tied=True)
    tower = part_of(c, "vision_config", model_type="siglip_vision_model")
    hidden, width = text.count("hidden_size"), tower.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    if first:
        whole_projector(t, "@multi_modal_projector.linear", width, hidden)
    else:
        name = "@multi_modal_projector.mm_input_projection_weight"  # input x output
        t.whole(name, width, hidden, why="a projector of one matrix: a cut would need a gather of all it makes")
        input_norm(t, "@multi_modal_projector.mm_soft_emb_norm", width, bias=False)
    return t
