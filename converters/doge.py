"""Doge: Llama with a weight on each residual path, and masks that every head makes from the values of all.

``dt_proj`` gives each KV head a number from the values of all KV heads. The values are gathered for it: a sum of
partial products would count a KV head twice where two ranks hold a copy.
Experts, where there are any, are single rows of two tables, looked up like words.
Source: transformers ``models/doge/modeling_doge.py``.
"""

from __future__ import annotations

from math import isqrt

from tpshard.axes import Units
from tpshard.blocks.dense import channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import NEEDS_GATHER, Table

FAMILY = "doge"
MODEL_TYPES = ("doge",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)
    q, kv = heads.query(size), heads.kv(size)

    t = decoder(c)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q", bias=bias)
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k", bias=bias)
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v", bias=bias, note=NEEDS_GATHER)
    t.linear(f"{layer}.self_attn.o_proj", hidden, q, role="o", bias=bias)
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    t.tensor(f"{layer}.self_attn.A", heads.kv(1), role="attn_head")
    why = "a number for each KV head from the gathered values of all"
    t.whole(f"{layer}.self_attn.dt_proj.weight", heads.kv_heads, heads.kv_heads * size, why=why)
    if bias:
        t.whole(f"{layer}.self_attn.dt_proj.bias", heads.kv_heads, why=why)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False))
    if c.flag("is_moe", default=False):
        count = c.count("num_experts", default=16384)
        rows = Units("experts", count, noun="experts of one row").each()
        t.embedding(f"{layer}.mlp.down_embed", rows, hidden)
        t.embedding(f"{layer}.mlp.up_embed", rows, hidden)
        t.linear(f"{layer}.mlp.router_gate", 2 * isqrt(count), hidden, role="router")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    for path in ("input_residual", "post_attention_residual"):
        t.whole(f"{layer}.{path}", hidden, why="a weight for every channel of the residual stream")
    return t
