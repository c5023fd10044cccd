"""Zaya: queries and keys mixed by convolutions along the sequence, half of the values a token late.

The router takes over what it made in the layer before.

Queries, keys and their convolutions are one unit a KV group: a key is made with the mean of its group's queries. A
model has few groups, so more ranks than groups hold attention whole: it is a fortieth of the model.
Source: transformers ``models/zaya/modeling_zaya.py``; arXiv 2510.04476.
"""

from __future__ import annotations

from tpshard.axes import Dim, Heads
from tpshard.blocks.dense import decoder, expert_channels, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "zaya"
MODEL_TYPES = ("zaya",)
SCALES = ("hidden_states_bias", "hidden_states_scale", "residual_bias", "residual_scale")
RESIDUAL = "scales the residual stream, which every rank holds"
ROUTER = "every rank makes the same choice of experts"


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    kv_heads, size = c.count("num_key_value_heads", default=2), c.count("head_dim", default=128)
    count, ffn = c.count("num_experts"), expert_channels(c, "moe_intermediate_size")
    heads = Heads("heads", query_heads, kv_heads, step=query_heads // kv_heads, or_whole=True)

    t = decoder(c, experts=count, tied=True, head_bias=c.flag("lm_head_bias", default=False))
    for scale in SCALES[:2]:
        t.whole(f"@input_{scale}", hidden, why=RESIDUAL)
    layer = "@layers.{layer}"
    _attention(t, f"{layer}.self_attn", heads, size, hidden, c)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    for scale in SCALES:
        t.whole(f"{layer}.post_attention_residual_scale.{scale}", hidden, why=RESIDUAL)
        t.whole(f"{layer}.post_mlp_residual_scale.{scale}", hidden, why=RESIDUAL)
    _router(t, f"{layer}.mlp.gate", c, hidden, count + 1)  # one more class: no expert at all
    t.tensor(f"{layer}.mlp.experts.gate_up_proj", count, ffn * 2, hidden, role="expert_gate_up")
    t.tensor(f"{layer}.mlp.experts.down_proj", count, hidden, ffn, role="expert_down")
    return t


def _attention(t: Table, at: str, heads: Heads, size: int, hidden: int, c: Config) -> None:
    bias, q, kv = c.flag("attention_bias", default=False), heads.query(size), heads.kv(size)
    t.linear(f"{at}.qkv_proj.q_proj", q, hidden, role="q", bias=bias)
    t.linear(f"{at}.qkv_proj.k_proj", kv, hidden, role="k", bias=bias)
    for half, rows in (("current", _values(heads, size, late=False)), ("delayed", _values(heads, size, late=True))):
        many = heads.kv_heads > 1  # of a single head, which no two ranks cut, either half is in one matrix
        role = "v" if many else "whole"
        t.linear(f"{at}.qkv_proj.v_proj_{half}", rows if many else size // 2, hidden, role=role, bias=bias)
    for conv, into, kernel in (("depthwise", 1, "cca_time0"), ("grouped", size, "cca_time1")):
        width = c.count(kernel, default=2)
        t.tensor(f"{at}.qkv_proj.conv_qk_{conv}.weight", q + kv, into, width, role="attn_head")
        t.tensor(f"{at}.qkv_proj.conv_qk_{conv}.bias", q + kv, role="attn_head_bias")
    t.tensor(f"{at}.qk_norm.temp", heads.kv(1), role="attn_head")
    t.linear(f"{at}.o_proj", hidden, q, role="o", bias=bias)


def _values(heads: Heads, size: int, *, late: bool) -> Dim:
    """Rows of the first half of all values, or of the second: half of the heads each; an odd head is in both."""
    half = heads.kv_heads // 2
    if heads.kv_heads % 2 == 0:
        return heads.kv_run(half, 2 * half, size) if late else heads.kv_run(0, half, size)
    middle = heads.kv_run(half, half + 1, size // 2)
    return middle + heads.kv_run(half + 1, 2 * half + 1, size) if late else heads.kv_run(0, half, size) + middle


def _router(t: Table, at: str, c: Config, hidden: int, classes: int) -> None:
    width = c.count("router_hidden_size", default=256)
    t.linear(f"{at}.down_proj", width, hidden, role="router", bias=True)
    with t.only(range(1, c.count("num_hidden_layers"))):
        t.whole(f"{at}.router_states_scale", width, why=ROUTER)  # what it takes over from the layer before
    t.norm(f"{at}.router_mlp.norm", width)
    t.linear(f"{at}.router_mlp.fc1", width, width, role="router", bias=True)
    t.linear(f"{at}.router_mlp.fc2", width, width, role="router", bias=True)
    t.linear(f"{at}.router_mlp.out_proj", classes, width, role="router")
    t.tensor(f"{at}.balancing_biases", classes, role="router_bias")
