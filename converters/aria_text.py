"""Aria's language model: experts stacked input x output as ``fc1`` and ``fc2``, gate and up halves of ``fc1``.

Source: transformers ``models/aria/modeling_aria.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, decoder, expert_channels, gated_mlp, heads_of, norms
from tpshard.blocks.experts import shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "aria_text"
MODEL_TYPES = ("aria_text",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)
    count, ffn = c.count("moe_num_experts"), expert_channels(c, "intermediate_size")

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    t.linear(f"{layer}.mlp.router", count, hidden, role="router")
    for block, first, second in (
        ("experts", "fc1.weight", "fc2.weight"),
        ("experts, as transformers names them", "gate_up_proj", "down_proj"),
    ):
        with t.block(block):
            t.tensor(f"{layer}.mlp.experts.{first}", count, hidden, ffn * 2, role="expert_gate_up")
            t.tensor(f"{layer}.mlp.experts.{second}", count, ffn, hidden, role="expert_down")
    t.one_of("experts", "experts, as transformers names them")
    shared = shared_channels(c.number("moe_num_shared_experts", default=2) * c.count("intermediate_size"))
    if shared is not None:
        mlp_bias = c.flag("mlp_bias", default=False)
        gated_mlp(t, f"{layer}.mlp.shared_experts", shared, hidden, bias=mlp_bias, part="shared_")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
