"""Granite's mixtures: stacked experts under two spellings, a shared MLP with gate and up in one matrix, sinks.

Source: transformers ``models/granitemoe{,shared,_swa}/modeling_granitemoe*.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, decoder, expert_channels, fused_mlp, heads_of, norms
from tpshard.blocks.experts import shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "granitemoe"
MODEL_TYPES = ("granitemoe", "granitemoe_swa", "granitemoeshared")


def table(c: Config) -> Table:
    hidden, heads, bias = c.count("hidden_size"), heads_of(c), c.flag("attention_bias", default=False)
    size, count = c.head_dim(heads.query_heads), c.count("num_local_experts", "num_experts")
    ffn, shared = expert_channels(c, "intermediate_size"), shared_channels(c.number("shared_intermediate_size"))

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    if c.model_type == "granitemoe_swa":
        t.tensor(f"{layer}.self_attn.sinks", heads.query(1), role="sinks")
    bank = f"{layer}.block_sparse_moe"
    with t.block("experts"):
        t.linear(f"{bank}.router.layer", count, hidden, role="router")
        t.tensor(f"{bank}.input_linear.weight", count, ffn * 2, hidden, role="expert_gate_up")
        t.tensor(f"{bank}.output_linear.weight", count, hidden, ffn, role="expert_down")
    with t.block("experts, as transformers names them"):
        t.linear(f"{bank}.router", count, hidden, role="router")
        t.tensor(f"{bank}.experts.gate_up_proj", count, ffn * 2, hidden, role="expert_gate_up")
        t.tensor(f"{bank}.experts.down_proj", count, hidden, ffn, role="expert_down")
    t.one_of("experts", "experts, as transformers names them")
    if shared is not None and c.model_type != "granitemoe":
        fused_mlp(t, f"{layer}.shared_mlp", shared, hidden, names=("input_linear", "output_linear"), part="shared_")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
