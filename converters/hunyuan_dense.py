"""Hunyuan's dense models: Llama's blocks with norms of q and k (``query_layernorm``, ``key_layernorm``).

Source: transformers ``models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py``.
"""

from __future__ import annotations

from tpshard.blocks import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "hunyuan_dense"
MODEL_TYPES = ("hunyuan_v1_dense",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)

    t = decoder(c)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, f"{layer}.self_attn", ("query_layernorm", "key_layernorm"), size)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
