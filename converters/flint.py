"""Flint: Qwen3-MoE's blocks with a sink for every head (``softmax_offset``) and a shared expert without a gate.

Source: transformers ``models/flint/modeling_flint.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, expert_channels, gated_mlp, heads_of, norms
from tpshard.blocks.experts import layers_where, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "flint"
MODEL_TYPES = ("flint",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=4)
    size, bias = c.head_dim(heads.query_heads, default=128), c.flag("attention_bias", default=False)
    count, step = c.count("num_experts"), c.count("decoder_sparse_step", default=1)
    alone = c.layer_numbers("mlp_only_layers", default=(0, 1))
    layers = layers_where(c, [at not in alone and not (at + 1) % step for at in range(c.count("num_hidden_layers"))])

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    t.tensor(f"{layer}.self_attn.softmax_offset", heads.query(1), role="sinks")
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, "moe_intermediate_size"), hidden,
            shared=shared_channels(c.count("shared_expert_intermediate_size")), shared_name="shared_expert",
        )  # fmt: skip
    return t
