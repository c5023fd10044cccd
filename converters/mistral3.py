"""Mistral 3 and LightOn OCR: a Pixtral tower, patches joined two by two, two matrices, a language model.

Source: transformers ``models/mistral3/modeling_mistral3.py``, ``models/lighton_ocr/modeling_lighton_ocr.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, input_norm, language_config, projector
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "mistral3"
MODEL_TYPES = ("lighton_ocr", "mistral3")


def table(c: Config) -> Table:
    ocr = c.model_type == "lighton_ocr"
    text = language_config(c, "text_config", model_type="qwen3" if ocr else "mistral", tied=True)
    tower = part_of(c, "vision_config", model_type="pixtral")
    hidden, width = text.count("hidden_size"), tower.count("hidden_size")
    feature_layers = c.get("vision_feature_layer", default=-1)
    into = width * (len(feature_layers) if isinstance(feature_layers, list) else 1)
    at = "@vision_projection" if ocr else "@multi_modal_projector"

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_encoder" if ocr else "vision_tower")
    input_norm(t, f"{at}.norm", width, bias=False)
    joined = c.count("spatial_merge_size", default=2) ** 2 * width
    t.whole(f"{at}.patch_merger.merging_layer.weight", width, joined, why="all it makes goes into the next matrix")
    projector(t, at, into, hidden, hidden, bias=not ocr and c.flag("multimodal_projector_bias", default=False))
    return t
