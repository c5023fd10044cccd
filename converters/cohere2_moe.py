"""Cohere 2 with experts: attention and MLP side by side behind one norm, experts as wide as ``intermediate_size``.

The first layers may be dense, of a width of their own.
Source: transformers ``models/cohere2_moe/modeling_cohere2_moe.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, expert_channels, gated_mlp, heads_of
from tpshard.blocks.experts import mixed_layers, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "cohere2_moe"
MODEL_TYPES = ("cohere2_moe",)


def table(c: Config) -> Table:
    hidden, heads, count = c.count("hidden_size"), heads_of(c), c.count("num_experts")
    size, bias = c.head_dim(heads.query_heads, default=128), c.flag("attention_bias", default=False)
    layers = mixed_layers(c)

    t = decoder(c, experts=count, tied=True)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    t.norm(f"{layer}.input_layernorm", hidden)
    if layers.dense:
        with t.only(layers.dense):
            gated_mlp(t, f"{layer}.mlp", channels_of(c, "prefix_dense_intermediate_size", "intermediate_size"), hidden)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, "intermediate_size"), hidden,
            shared=shared_channels(c.number("num_shared_experts") * c.count("intermediate_size")),
        )  # fmt: skip
    return t
