"""MiMo-V2-Flash: layers with a sliding window have twice the KV heads and a sink for every query head.

Values are narrower than queries and keys.
Source: transformers ``models/mimo_v2_flash/modeling_mimo_v2_flash.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.dense import attention, channels_of, decoder, expert_channels, gated_mlp, norms
from tpshard.blocks.experts import CORRECTION, DRAFTS, mixed_layers, mixture
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "mimo_v2_flash"
MODEL_TYPES = ("mimo_v2_flash",)


def table(c: Config) -> Table:
    hidden, depth = c.count("hidden_size"), c.count("num_hidden_layers")
    query_heads, kv_heads = c.count("num_attention_heads"), c.count("num_key_value_heads", default=4)
    size, value = c.count("head_dim", default=192), c.count("v_head_dim", default=128)
    bias, count = c.flag("attention_bias", default=False), c.count("n_routed_experts")
    layers = mixed_layers(c, first_dense=1)
    usual = ["sliding_attention" if at and (at + 1) % 6 else "full_attention" for at in range(depth)]
    kinds = c.with_usual(layer_types=usual).listed("layer_types", depth)

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    for kind, heads in (
        ("full_attention", Heads("heads", query_heads, kv_heads)),
        ("sliding_attention", Heads("sliding_heads", query_heads, 2 * kv_heads)),
    ):
        with t.only(at for at, of_layer in enumerate(kinds) if of_layer == kind):
            attention(
                t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
                v=heads.kv(value), o=heads.query(value), bias=bias,
            )  # fmt: skip
            if kind == "sliding_attention":
                t.tensor(f"{layer}.self_attn.attention_sink_bias", heads.query(1), role="sinks")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, "moe_intermediate_size"), hidden, correction=CORRECTION
        )
    t.whole_module("@mtp", why=DRAFTS, optional=True)
    return t
