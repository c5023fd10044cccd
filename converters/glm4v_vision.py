"""GLM-4V's vision tower: gated MLPs as wide as the tower's output, and a gated merger to the language model.

q, k, v are three blocks of one matrix. What joins patches (``downsample``, ``merger.proj``) is whole.
Source: transformers ``models/glm4v/modeling_glm4v.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import projector_channels
from tpshard.blocks.dense import gated_mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "glm4v_vision"
MODEL_TYPES = ("glm4v_vision", "glm4v_moe_vision")
_USUAL = {"depth": 24, "num_heads": 12, "hidden_size": 1536, "intermediate_size": 13696, "image_size": 336,
          "in_channels": 3, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
          "out_hidden_size": 4096}  # fmt: skip
USUAL = dict.fromkeys(MODEL_TYPES, _USUAL)


def table(c: Config) -> Table:
    width, out, count = c.count("hidden_size"), c.count("out_hidden_size"), c.count("num_heads", "num_attention_heads")
    heads, size, bias = Heads("heads", count, count), width // count, c.flag("attention_bias", default=False)
    ffn = Units("ffn", out, noun="feed-forward channels").each()
    patch, merge = c.count("patch_size"), c.count("spatial_merge_size")

    t = Table(c.count("depth", "num_hidden_layers"))
    t.tensor(
        "@patch_embed.proj.weight", width, c.count("in_channels"), c.count("temporal_patch_size"),
        patch, patch, role="vision",
    )  # fmt: skip
    t.tensor("@patch_embed.proj.bias", width, role="vision_bias")
    t.embedding("@embeddings.position_embedding", (c.count("image_size") // patch) ** 2, width, role="position")
    t.norm("@post_conv_layernorm", width)
    layer = "@blocks.{layer}"
    t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, width, role="qkv", bias=bias)
    t.linear(f"{layer}.attn.proj", width, heads.query(size), role="o")
    gated_mlp(t, f"{layer}.mlp", ffn, width)
    norms(t, layer, ("norm1", "norm2"), width)
    t.norm("@post_layernorm", width)
    t.tensor("@downsample.weight", out, width, merge, merge, role="vision")
    t.tensor("@downsample.bias", out, role="vision_bias")
    t.whole("@merger.proj.weight", out, out, why="a norm of all its outputs follows")
    t.norm("@merger.post_projection_norm", out, bias=True)
    channels = projector_channels(c.count("intermediate_size"))
    t.linear("@merger.gate_proj", channels, out, role="projector_in")
    t.linear("@merger.up_proj", channels, out, role="projector_in")
    t.linear("@merger.down_proj", out, channels, role="projector_out")
    return t
