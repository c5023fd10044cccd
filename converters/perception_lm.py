"""Perception LM and FastVLM: towers of the library timm, two matrices, a language model.

Perception LM's tower is a ViT, whose heads and channels timm knows by the architecture's name: those of the
Perception Encoder are cut. Other towers (FastVLM's is a convolutional net with attention at its end) are whole.
Source: transformers ``models/{perception_lm,fast_vlm}/modeling_*.py``; timm ``models/eva.py`` (``vit_pe_*``).
"""

from __future__ import annotations

import re

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import MODEL, include_language, language_config, projector
from tpshard.blocks.dense import mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "perception_lm"
MODEL_TYPES = ("fast_vlm", "perception_lm")
ENCODERS = {  # of vit_pe_{core,lang,spatial}_{size}: width, heads, channels
    "tiny": (192, 3, 768), "small": (384, 6, 1536), "base": (768, 12, 3072), "large": (1024, 16, 4096),
    "gigantic": (1536, 16, 8960),
}  # fmt: skip


def table(c: Config) -> Table:
    fast = c.model_type == "fast_vlm"
    text = language_config(c, "text_config", model_type="qwen2" if fast else "llama")
    vision = c.nested("vision_config")
    arguments = Config(vision.get("model_args", default={}))
    hidden = text.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    size = re.match(r"vit_pe_(?:core|lang|spatial)_([a-z]+)_", str(vision.get("architecture")))
    known = ENCODERS.get(size[1]) if size else None
    if known and arguments.get("depth"):
        _encoder(t, arguments, *known)
    else:
        t.whole_module("@vision_tower.timm_model", why="a net of timm, of which the config gives no heads or channels")
    into = vision.count("hidden_size", default=3072) if fast else arguments.count("embed_dim")
    bias = not fast or c.flag("multimodal_projector_bias", default=True)
    projector(t, "@multi_modal_projector", into, hidden, hidden, bias=bias)
    return t


def _encoder(t: Table, c: Config, width: int, count: int, channels: int) -> None:
    """The Perception Encoder: q, k, v as three blocks of one matrix, positions, a scale for what each block gives."""
    width = c.count("embed_dim", default=width)
    heads, size = Heads("vision_heads", count, count, or_whole=True), width // count
    ffn = Units("vision_ffn", channels, noun="feed-forward channels", or_whole=True).each()
    at = tuple(f"{outer}vision_tower.timm_model." for outer in MODEL)
    with t.stack(c.count("depth"), prefixes=at):
        t.tensor("@patch_embed.proj.weight", width, 3, None, None, role="vision")
        t.tensor("@patch_embed.proj.bias", width, role="vision_bias", optional=True)
        t.tensor("@cls_token", 1, 1, width, role="vision", optional=True)
        t.tensor("@pos_embed", 1, None, width, role="position")
        for norm in ("@norm_pre", "@norm"):
            t.norm(norm, width, bias=True, optional=True)
        layer = "@blocks.{layer}"
        t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, width, role="qkv", bias=True)
        t.linear(f"{layer}.attn.proj", width, heads.query(size), role="o", bias=True)
        mlp(t, f"{layer}.mlp", ffn, width)
        for scale in ("gamma_1", "gamma_2"):
            t.tensor(f"{layer}.{scale}", width, role="norm", optional=True)
        norms(t, layer, ("norm1", "norm2"), width, bias=True)
