"""Hunyuan's dense models: Llama's blocks with norms of q and k (``query_layernorm``, ``key_layernorm``).

Source: transformers ``models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py``, ``models/hunyuan_vl/``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "hunyuan_dense"
MODEL_TYPES = ("hunyuan_v1_dense", "hunyuan_vl_text")
USUAL = {
    "hunyuan_vl_text": {"vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008,
                        "num_hidden_layers": 32, "num_attention_heads": 32},
}  # fmt: skip


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads, default=c.get("attention_head_dim"))
    bias = c.flag("attention_bias", default=False)

    t = decoder(c, tied=c.model_type == "hunyuan_vl_text")
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, f"{layer}.self_attn", ("query_layernorm", "key_layernorm"), size)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
