"""The vision towers of GLM-OCR and GLM-5-Next: GLM-4V's with norms of queries and keys, and biases in every layer.

What joins patches (``downsample``, ``merger.proj``) is whole.
Source: transformers ``models/glm_ocr/modeling_glm_ocr.py``, ``models/glm5_next/modeling_glm5_next.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import projector_channels
from tpshard.blocks.dense import channels_of, gated_mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "glm_ocr_vision"
USUAL = {
    "glm_ocr_vision": {"depth": 24, "num_heads": 16, "hidden_size": 1024, "intermediate_size": 4096, "in_channels": 3,
                       "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 1536},
    "glm5_next_vision": {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2,
                         "projection_intermediate_size": 10_240},
}  # fmt: skip
MODEL_TYPES = tuple(USUAL)


def table(c: Config) -> Table:
    width, out, count = c.count("hidden_size"), c.count("out_hidden_size"), c.count("num_heads", "num_attention_heads")
    heads, size, bias = Heads("heads", count, count), width // count, c.flag("attention_bias", default=True)
    patch, merge, layer = c.count("patch_size"), c.count("spatial_merge_size"), "@blocks.{layer}"

    t = Table(c.count("depth", "num_hidden_layers"))
    t.tensor(
        "@patch_embed.proj.weight", width, c.count("in_channels"), c.count("temporal_patch_size"),
        patch, patch, role="vision",
    )  # fmt: skip
    t.tensor("@patch_embed.proj.bias", width, role="vision_bias")
    t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, width, role="qkv", bias=bias)
    t.linear(f"{layer}.attn.proj", width, heads.query(size), role="o", bias=bias)
    norms(t, f"{layer}.attn", ("q_norm", "k_norm"), size)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), width, bias=bias)
    norms(t, layer, ("norm1", "norm2"), width)
    t.norm("@post_layernorm", width)
    t.tensor("@downsample.weight", out, width, merge, merge, role="vision")
    t.tensor("@downsample.bias", out, role="vision_bias")
    t.whole("@merger.proj.weight", out, out, why="a norm of all its outputs follows")
    t.norm("@merger.post_projection_norm", out, bias=True)
    channels = projector_channels(c.count("projection_intermediate_size", default=out * c.count("in_channels")))
    t.linear("@merger.gate_proj", channels, out, role="projector_in")
    t.linear("@merger.up_proj", channels, out, role="projector_in")
    t.linear("@merger.down_proj", out, channels, role="projector_out")
    return t
