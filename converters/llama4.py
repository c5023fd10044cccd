"""Llama 4: experts stacked input x output in some layers, dense MLPs in the others, a shared expert beside the routed.

Source: transformers ``models/llama4/modeling_llama4.py``.
"""

from __future__ import annotations

from tpshard.blocks import attention, channels_of, decoder, expert_channels, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.mixtures import layers_where, shared_channels
from tpshard.table import Table

FAMILY = "llama4"
MODEL_TYPES = ("llama4_text",)


def table(c: Config) -> Table:
    hidden, heads, depth = c.count("hidden_size"), heads_of(c, default_kv=8), c.count("num_hidden_layers")
    size, bias = c.head_dim(heads.query_heads, default=128), c.flag("attention_bias", default=False)
    count, ffn = c.count("num_local_experts", "num_experts"), expert_channels(c, "intermediate_size")
    step = c.count("interleave_moe_layer_step", default=1)
    sparse = c.get("moe_layers", default=range(step - 1, depth, step))
    layers = layers_where(c, [at in sparse for at in range(depth)])

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    if layers.dense:
        with t.only(layers.dense):
            gated_mlp(t, f"{layer}.feed_forward", channels_of(c, "intermediate_size_mlp"), hidden)
    with t.only(layers.sparse):
        t.linear(f"{layer}.feed_forward.router", count, hidden, role="router")
        t.tensor(f"{layer}.feed_forward.experts.gate_up_proj", count, hidden, ffn * 2, role="expert_gate_up")
        t.tensor(f"{layer}.feed_forward.experts.down_proj", count, ffn, hidden, role="expert_down")
        shared = shared_channels(c.count("intermediate_size"))
        gated_mlp(t, f"{layer}.feed_forward.shared_expert", shared, hidden, part="shared_")
    return t
