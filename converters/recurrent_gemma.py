"""RecurrentGemma (Griffin): two layers with a gated linear recurrence to one with local attention.

The recurrence's gates are matrices of a head each, so it is cut by heads.
Source: transformers ``models/recurrent_gemma/modeling_recurrent_gemma.py``; arXiv 2402.19427.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import decoder, gated_mlp, heads_of, norms
from tpshard.blocks.mixers import convolution
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "recurrent_gemma"
MODEL_TYPES = ("recurrent_gemma",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = hidden // heads.query_heads, c.flag("attention_bias", default=False)
    ffn = Units("ffn", c.count("intermediate_size") // 2, noun="feed-forward channels").each()

    t = decoder(c, norm="final_norm", tied=True)
    layer, at = "@layers.{layer}", "@layers.{layer}.temporal_block"
    blocks = c.get("block_types", "_block_types", default=("recurrent", "recurrent", "attention"))
    recurrent = [number for number in range(t.layers) if blocks[number % len(blocks)] == "recurrent"]
    with t.only(set(range(t.layers)) - set(recurrent)):
        for name, rows in (("q", heads.query(size)), ("k", heads.kv(size)), ("v", heads.kv(size))):
            t.linear(f"{at}.{name}_proj", rows, hidden, role=name, bias=bias)
        t.linear(f"{at}.o_proj", hidden, heads.query(size), role="o", bias=True)
    with t.only(recurrent):
        own = Units("linear_heads", heads.query_heads, noun="heads of the recurrence")
        width = c.count("lru_width", default=hidden) // own.count
        wide = own.each(width)
        for name in ("linear_x", "linear_y"):
            t.linear(f"{at}.{name}", wide, hidden, role="linear_in", bias=True)
        convolution(t, f"{at}.conv_1d", wide, c.count("conv1d_width", default=4), bias=True)
        for name in ("input_gate", "recurrent_gate"):
            t.tensor(f"{at}.rg_lru.{name}_weight", own.each(), width, width, role="linear_head")
            t.tensor(f"{at}.rg_lru.{name}_bias", own.each(), width, role="linear_head_bias")
        t.tensor(f"{at}.rg_lru.recurrent_param", wide, role="linear_head")
        t.linear(f"{at}.linear_out", hidden, wide, role="linear_out", bias=True)
    gated_mlp(t, f"{layer}.mlp_block", ffn, hidden, bias=True)
    norms(t, layer, ("temporal_pre_norm", "channel_pre_norm"), hidden)
    return t
