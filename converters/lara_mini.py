"""Lara-Mini: Qwen3.5's gated delta net with all its matrices in one, attention without gates, stacked experts.

Source: transformers ``models/lara_mini/modeling_lara_mini.py``; names on disk: ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import attention, decoder, expert_channels, experts, gated_mlp, heads_of, norms
from tpshard.blocks.mixers import ATTENTION, RECURRENT, delta_heads, delta_net, layers_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "lara_mini"
MODEL_TYPES = ("lara_mini",)
PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


def table(c: Config) -> Table:
    c = c.with_usual(linear_key_head_dim=128, linear_value_head_dim=128)
    c = c.with_usual(linear_num_key_heads=8, linear_num_value_heads=16)
    hidden, heads, d = c.count("hidden_size"), heads_of(c), delta_heads(c)
    size, bias = c.head_dim(heads.query_heads, default=128), c.flag("attention_bias", default=False)
    count = c.count("num_experts", "num_local_experts", default=128)
    width = c.count("shared_expert_intermediate_size", default=512)

    t = decoder(c, experts=count, tied=True)
    layer = "@layers.{layer}"
    usual = [PATTERN[number % len(PATTERN)] for number in range(t.layers)]
    types = c.with_usual(layer_types=usual).listed("layer_types", t.layers)
    with t.only(layers_of(types, *RECURRENT)):
        delta_net(
            t, f"{layer}.linear_attn", d, hidden, ins={"in_proj": d.qkv + d.value + d.one + d.one},
            convolutions={"conv1d": d.qkv}, kernel=c.count("linear_conv_kernel_dim", default=4), norm="out_norm",
        )  # fmt: skip
    with t.only(layers_of(types, *ATTENTION)):
        at = f"{layer}.self_attn"
        attention(t, at, heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
        norms(t, at, ("q_norm", "k_norm"), size)
    t.linear(f"{layer}.mlp.gate", count, hidden, role="router")
    shared = Units("shared_ffn", width, noun="channels of the shared expert").each()
    gated_mlp(t, f"{layer}.mlp.shared_expert", shared, hidden, part="shared_")
    experts(t, f"{layer}.mlp.experts", count, expert_channels(c, "moe_intermediate_size"), hidden)
    t.one_of("experts", "stacked experts")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
