"""MiniMax-M2: Mixtral's experts with a correction for the router, q and k normalised over all heads at once.

Source: transformers ``models/minimax_m2/modeling_minimax_m2.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import MIXTRAL, attention, decoder, expert_channels, experts, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "minimax_m2"
MODEL_TYPES = ("minimax_m2",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=8)
    size, count = c.head_dim(heads.query_heads, default=128), c.count("num_local_experts", "num_experts")
    q, kv = heads.query(size), heads.kv(size)

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", q, kv, hidden)
    t.norm(f"{layer}.self_attn.q_norm", q)
    t.norm(f"{layer}.self_attn.k_norm", kv)
    for block, at in (("experts", f"{layer}.block_sparse_moe"), ("stacked experts", f"{layer}.mlp")):
        with t.block(block):
            t.linear(f"{at}.gate", count, hidden, role="router")
            t.tensor(f"{at}.e_score_correction_bias", count, role="router_bias")
    experts(
        t, f"{layer}.block_sparse_moe.experts", count, expert_channels(c, "intermediate_size"), hidden,
        names=MIXTRAL, bank=f"{layer}.mlp.experts",
    )  # fmt: skip
    t.one_of("experts", "stacked experts")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
