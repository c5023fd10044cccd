"""DeepSeek-VL with two towers: SigLIP's for the whole image, SAM's for its details, one projector for both.

What SAM's tower gives, early and late, goes through convolutions; each tower's vectors through a matrix of its own to
half the width, and both halves together through a last one.
Source: transformers ``models/deepseek_vl_hybrid/modeling_deepseek_vl_hybrid.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "deepseek_vl_hybrid"
MODEL_TYPES = ("deepseek_vl_hybrid",)
HALVES = "small beside the towers, and the last takes what the other two make one after the other"
CONVOLUTIONS = "convolutions that run once after the tower"


def table(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="llama", tied=True)
    tower = part_of(c, "vision_config", model_type="siglip_vision_model")
    fine = part_of(c, "high_res_vision_config", model_type="sam_vision_model")
    hidden, detail = text.count("hidden_size"), 4 * fine.count("output_channels", default=256)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_model")
    include_tower(t, fine, "high_res_vision_model.vision_encoder", axes="high_res_")
    t.whole_module("@high_res_vision_neck", why=CONVOLUTIONS)
    t.whole_module("@high_res_vision_proj", why=CONVOLUTIONS)
    t.whole("@high_res_vision_alpha", 1, why="how much of the early vectors is added to the late")
    half, at = hidden // 2, "@aligner"
    for name, out, into in (
        ("high_res_vision_proj", half, detail),
        ("vision_proj", half, tower.count("hidden_size")),
        ("proj", hidden, hidden),
    ):
        t.whole(f"{at}.{name}.weight", out, into, why=HALVES)
        t.whole(f"{at}.{name}.bias", out, why=HALVES)
    return t
