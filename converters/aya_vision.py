"""Aya Vision and Command A Vision: a SigLIP tower, patches joined, a gated projector, a Cohere language model.

The projector's first matrix makes ``[x; gate]``.
Source: transformers ``models/aya_vision/modeling_aya_vision.py``, ``models/cohere2_vision/``.
"""

from __future__ import annotations

from tpshard.blocks.composite import (
    MODEL,
    include_language,
    include_tower,
    input_norm,
    language_config,
    projector_channels,
)  # fmt: skip
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "aya_vision"
MODEL_TYPES = ("aya_vision", "cohere2_vision")


def table(c: Config) -> Table:
    aya = c.model_type == "aya_vision"
    text = language_config(c, "text_config", model_type="cohere2", tied=True)
    tower = part_of(c, "vision_config", model_type="siglip_vision_model")
    hidden = text.count("hidden_size")
    joined = tower.count("hidden_size") * c.count("downsample_factor", default=2) ** 2
    channels = projector_channels(c.count("alignment_intermediate_size", default=hidden if aya else 36864) // 2)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    if aya:
        input_norm(t, "@multi_modal_projector.layernorm", joined)
    t.linear("@multi_modal_projector.linear_1", channels * 2, joined, role="projector_in", bias=True)
    t.linear("@multi_modal_projector.linear_2", hidden, channels, role="projector_out", bias=True)
    return t
