"""Granite with windowed attention: Llama's blocks, and for every query head a sink that its softmax may fall into.

Source: transformers ``models/granite_swa/modeling_granite_swa.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "granite_swa"
MODEL_TYPES = ("granite_swa",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)

    t = decoder(c, tied=True)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    t.tensor(f"{layer}.self_attn.sinks", heads.query(1), role="sinks")
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
