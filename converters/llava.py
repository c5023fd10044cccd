"""LLaVA and its successors: a CLIP or SigLIP tower, two matrices to the language model's width, a language model.

LLaVA-NeXT and OneVision have a vector for the end of a row of patches, ViP-LLaVA joins several layers of the tower and
normalises them, Video-LLaVA has two towers.
Source: transformers ``models/{llava,llava_next,llava_next_video,llava_onevision,vipllava,video_llava}``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, input_norm, language_config, projector
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "llava"
MODEL_TYPES = ("llava", "llava_next", "llava_next_video", "llava_onevision", "video_llava", "vipllava")


def table(c: Config) -> Table:
    onevision = c.model_type == "llava_onevision"
    text = language_config(c, "text_config", model_type="qwen2" if onevision else "llama")
    tower = part_of(c, "vision_config", model_type="siglip_vision_model" if onevision else "clip_vision_model")
    hidden, vip = text.count("hidden_size"), c.model_type == "vipllava"
    feature_layers = c.get("vision_feature_layer", default=[-2, -5, -8, -11, 6] if vip else -2)
    into = tower.count("hidden_size") * (len(feature_layers) if isinstance(feature_layers, list) else 1)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    if c.model_type == "video_llava":
        include_tower(t, tower, "image_tower", axes="image_")
        include_tower(t, tower, "video_tower", axes="video_")
    else:
        include_tower(t, tower, "vision_tower")
    bias = vip or c.flag("multimodal_projector_bias", default=True)
    if vip:
        input_norm(t, "@multi_modal_projector.projector_layernorm", into)
    projector(t, "@multi_modal_projector", into, hidden, hidden, bias=bias)
    if c.model_type in ("llava_next", "llava_next_video", "llava_onevision"):
        t.tensor("@image_newline", hidden, role="vision")
    return t
