"""Phi-3 and Phi-4: q, k, v stored as three blocks of one matrix, gate and up as two of another.

Source: transformers ``models/phi3/modeling_phi3.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "phi3"
MODEL_TYPES = ("phi3",)


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads = Heads("heads", query_heads, c.count("num_key_value_heads", default=query_heads))
    size = c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(layers=c.count("num_hidden_layers"), prefixes=("model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.qkv_proj", q + kv + kv, hidden, role="qkv")
    t.linear(f"{layer}.self_attn.o_proj", hidden, q, role="o")
    t.linear(f"{layer}.mlp.gate_up_proj", ffn * 2, hidden, role="gate_up")
    t.linear(f"{layer}.mlp.down_proj", hidden, ffn, role="down")
    t.norm(f"{layer}.input_layernorm", hidden)
    t.norm(f"{layer}.post_attention_layernorm", hidden)
    t.norm("@norm", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    return t
