"""Laguna: layers with query heads of their own number each, and a gate for every head or every channel of it.

Source: transformers ``models/laguna/modeling_laguna.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.dense import attention, channels_of, decoder, expert_channels, gated_mlp, norms
from tpshard.blocks.experts import mixed_layers, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "laguna"
MODEL_TYPES = ("laguna",)


def table(c: Config) -> Table:
    hidden, depth = c.count("hidden_size"), c.count("num_hidden_layers")
    size, bias = c.count("head_dim", default=128), c.flag("attention_bias", default=False)
    count, layers = c.count("num_experts"), mixed_layers(c, first_dense=1)
    gate = 1 if c.get("gating", default=True) in (True, "per-head") else size
    usual = c.with_usual(num_attention_heads_per_layer=[c.count("num_attention_heads")] * depth)
    query_heads = usual.listed("num_attention_heads_per_layer", depth)

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    for number in sorted(set(query_heads)):
        heads = Heads(f"heads_{number}", number, c.count("num_key_value_heads", default=8))
        with t.only(at for at, of_layer in enumerate(query_heads) if of_layer == number):
            attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
            t.linear(f"{layer}.self_attn.g_proj", heads.query(gate), hidden, role="attn_gate")
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, "moe_intermediate_size"), hidden,
            correction="experts.e_score_correction_bias", shared_name="shared_expert",
            shared=shared_channels(c.count("shared_expert_intermediate_size", default=512)),
        )  # fmt: skip
    return t
