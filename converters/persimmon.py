"""Persimmon: q, k, v of one head together in ``query_key_value``, biases and norms of q and k.

Source: transformers ``models/persimmon/modeling_persimmon.py``, ``_split_heads``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.dense import channels_of, decoder, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "persimmon"
MODEL_TYPES = ("persimmon",)
USUAL = {
    "persimmon": {"vocab_size": 262144, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 36,
                  "num_attention_heads": 64},
}  # fmt: skip


def table(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", count, count), c.head_dim(count)

    t = decoder(c, norm="final_layernorm", norm_bias=True)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.query_key_value", heads.grouped(size, size, size), hidden, role="qkv", bias=True)
    t.linear(f"{layer}.self_attn.dense", hidden, heads.query(size), role="o", bias=True)
    if c.flag("qk_layernorm", default=True):
        norms(t, f"{layer}.self_attn", ("q_layernorm", "k_layernorm"), size, bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden, names=("dense_h_to_4h", "dense_4h_to_h"))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
    return t
