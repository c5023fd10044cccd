"""DINOv3: a ViT with rotary positions and registers, whose MLP may be gated.

Source: transformers ``models/dinov3_vit/modeling_dinov3_vit.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.dense import channels_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "dinov3_vit"
MODEL_TYPES = ("dinov3_vit",)


def table(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    ffn, heads, size = channels_of(c), Heads("heads", count, count), hidden // count
    mlp_bias, kv = c.flag("mlp_bias", default=True), heads.kv(size)

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@embeddings.patch_embeddings.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor("@embeddings.patch_embeddings.bias", hidden, role="vision_bias")
    t.tensor("@embeddings.cls_token", 1, 1, hidden, role="vision")
    t.tensor("@embeddings.mask_token", 1, 1, hidden, role="vision")
    t.tensor("@embeddings.register_tokens", 1, c.number("num_register_tokens"), hidden, role="vision")
    layer = "@layer.{layer}"
    for name, role, dim in (("query", "q", heads.query(size)), ("key", "k", kv), ("value", "v", kv)):
        bias = c.flag(f"{name}_bias", default=role != "k")
        t.linear(f"{layer}.attention.{role}_proj", dim, hidden, role=role, bias=bias)
    t.linear(f"{layer}.attention.o_proj", hidden, heads.query(size), role="o", bias=c.flag("proj_bias", default=True))
    if c.flag("use_gated_mlp", default=False):
        t.linear(f"{layer}.mlp.gate_proj", ffn, hidden, role="gate", bias=mlp_bias)
    t.linear(f"{layer}.mlp.up_proj", ffn, hidden, role="up", bias=mlp_bias)
    t.linear(f"{layer}.mlp.down_proj", hidden, ffn, role="down", bias=mlp_bias)
    norms(t, layer, ("norm1", "norm2"), hidden, bias=True)
    for scale in ("layer_scale1", "layer_scale2"):
        t.whole(f"{layer}.{scale}.lambda1", hidden, why="scales what is summed over ranks already")
    t.norm("@norm", hidden, bias=True)
    return t
