"""The image encoder of SAM: a ViT with windows, and tables of relative positions that all heads share.

Source: transformers ``models/sam/modeling_sam.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "sam_vision"
MODEL_TYPES = ("sam_vision_model",)
NECK = "runs once after the encoder, and is small beside it"


def table(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    heads, size, places = Heads("heads", count, count), hidden // count, c.count("image_size") // patch
    width = c.count("mlp_dim", default=int(hidden * c.get("mlp_ratio", default=4.0)))
    ffn, depth = Units("ffn", width, noun="feed-forward channels").each(), c.count("num_hidden_layers")

    t = Table(depth, prefixes=("vision_encoder.", ""))
    t.tensor("@patch_embed.projection.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor("@patch_embed.projection.bias", hidden, role="vision_bias")
    if c.flag("use_abs_pos", default=True):
        t.tensor("@pos_embed", 1, places, places, hidden, role="position")
    layer = "@layers.{layer}"
    qkv = heads.query(size) + heads.kv(size) * 2
    t.linear(f"{layer}.attn.qkv", qkv, hidden, role="qkv", bias=c.flag("qkv_bias", default=True))
    t.linear(f"{layer}.attn.proj", hidden, heads.query(size), role="o", bias=True)
    t.linear(f"{layer}.mlp.lin1", ffn, hidden, role="up", bias=True)
    t.linear(f"{layer}.mlp.lin2", hidden, ffn, role="down", bias=True)
    norms(t, layer, ("layer_norm1", "layer_norm2"), hidden, bias=True)
    if c.flag("use_rel_pos", default=True):
        everywhere = frozenset(c.get("global_attn_indexes", default=[2, 5, 8, 11]))
        window = c.number("window_size", default=14) or places
        for layers, side in ((everywhere, places), (frozenset(range(depth)) - everywhere, window)):
            with t.only(layers):
                for axis in "hw":
                    t.tensor(f"{layer}.attn.rel_pos_{axis}", 2 * side - 1, size, role="position")
    t.whole_module("@neck", why=NECK)
    return t
