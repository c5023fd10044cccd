"""BitNet b1.58: norms inside attention and MLP, over all heads and all channels, so they are cut and need a sum.

Source: transformers ``models/bitnet/modeling_bitnet.py`` (``attn_sub_norm``, ``ffn_sub_norm``).
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "bitnet"
MODEL_TYPES = ("bitnet",)


def table(c: Config) -> Table:
    hidden, heads, ffn = c.count("hidden_size"), heads_of(c, default_kv=5), channels_of(c)
    q, kv = heads.query(c.head_dim(heads.query_heads)), heads.kv(c.head_dim(heads.query_heads))
    bias = c.flag("attention_bias", default=False)

    t = decoder(c)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", q, kv, hidden, bias=bias, out_bias=bias)
    t.norm(f"{layer}.self_attn.attn_sub_norm", q)
    gated_mlp(t, f"{layer}.mlp", ffn, hidden)
    t.norm(f"{layer}.mlp.ffn_sub_norm", ffn)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
