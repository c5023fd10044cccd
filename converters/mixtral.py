"""Mixtral and PhiMoE: experts w1 (gate), w3 (up), w2 (down), each apart or all stacked under transformers 5's names.

Every expert is cut along its own width; the router stays whole. PhiMoE's norms have biases.
Source: transformers ``models/{mixtral,phimoe}/modeling_*.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import MIXTRAL, attention, decoder, expert_channels, experts, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "mixtral"
MODEL_TYPES = ("mixtral", "phimoe")


def table(c: Config) -> Table:
    phi = c.model_type == "phimoe"
    hidden, heads, bias = c.count("hidden_size"), heads_of(c), phi and c.flag("attention_bias", default=False)
    size = c.head_dim(heads.query_heads)
    count = c.count("num_local_experts", "num_experts")

    t = decoder(c, experts=count, norm_bias=phi, head_bias=phi and c.flag("lm_head_bias", default=False))
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    with t.block("experts"):
        t.linear(f"{layer}.block_sparse_moe.gate", count, hidden, role="router")
    with t.block("stacked experts"):
        t.linear(f"{layer}.mlp.{'router' if phi else 'gate'}", count, hidden, role="router")
    experts(
        t, f"{layer}.block_sparse_moe.experts", count, expert_channels(c, "intermediate_size"), hidden,
        names=MIXTRAL, bank=f"{layer}.mlp.experts",
    )  # fmt: skip
    t.one_of("experts", "stacked experts")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=phi)
    return t
