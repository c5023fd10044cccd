"""AFMoE (Trinity) and Beam: what the heads give is multiplied with a gate, and four norms surround attention and MLP.

Source: transformers ``models/afmoe/modeling_afmoe.py``, ``models/beam/modeling_beam.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, expert_channels, gated_mlp, heads_of, norms
from tpshard.blocks.experts import CORRECTION, mixed_layers, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "afmoe"
MODEL_TYPES = ("afmoe", "beam")


def table(c: Config) -> Table:
    beam = c.model_type == "beam"
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=8 if beam else None)
    size, bias = c.head_dim(heads.query_heads, default=128), c.flag("attention_bias", default=False)
    count, width = c.count("num_experts"), c.count("moe_intermediate_size")
    layers = mixed_layers(c, first_dense=3) if beam else mixed_layers(c, first_dense=1, key="num_dense_layers")

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    t.linear(f"{layer}.self_attn.gate_proj", heads.query(size), hidden, role="attn_gate")
    if beam:
        t.tensor(f"{layer}.self_attn.gate_bias", heads.query(1), role="attn_head")
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    norms(t, layer, [f"{when}_{'feedforward' if beam else 'mlp'}_layernorm" for when in ("pre", "post")], hidden)
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, "moe_intermediate_size"), hidden,
            router="gate" if beam else "router.gate", correction=CORRECTION if beam else "expert_bias",
            shared=None if beam else shared_channels(c.number("num_shared_experts", default=2) * width),
        )  # fmt: skip
    return t
