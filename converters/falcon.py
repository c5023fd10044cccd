"""Falcon, whose one ``query_key_value`` has three orders.

New decoder (40B, 180B, 11B): group after group its query heads, its k, its v. Multi-query (7B): all
query heads, then one k and one v. Neither (RW): q, k, v of one head together.
Source: transformers ``models/falcon/modeling_falcon.py``, ``_split_heads`` and ``FalconDecoderLayer``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "falcon"
MODEL_TYPES = ("falcon",)


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads", "n_head")
    size, bias = c.head_dim(query_heads), c.flag("bias", default=False)
    new_decoder = c.flag("new_decoder_architecture", default=False)
    if new_decoder:
        heads = Heads("heads", query_heads, c.count("num_kv_heads", "n_head_kv", default=query_heads))
        qkv = heads.grouped(size, size, size)
    elif c.flag("multi_query", default=True):
        heads = Heads("heads", query_heads, 1)
        qkv = heads.query(size) + heads.kv(size) * 2
    else:
        heads = Heads("heads", query_heads, query_heads)
        qkv = heads.grouped(size, size, size)
    ffn = Units("ffn", c.count("ffn_hidden_size", default=4 * hidden), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    norms = ["input_layernorm"]
    if not c.flag("parallel_attn", default=True):
        norms.append("post_attention_layernorm")
    elif c.count("num_ln_in_parallel_attn", default=2 if new_decoder else 1) == 2:
        norms = ["ln_attn", "ln_mlp"]

    t = Table(layers=c.count("num_hidden_layers", "n_layer"), prefixes=("transformer.", ""))
    t.embedding("@word_embeddings", vocab, hidden)
    layer = "@h.{layer}"
    t.linear(f"{layer}.self_attention.query_key_value", qkv, hidden, role="qkv", bias=bias)
    t.linear(f"{layer}.self_attention.dense", hidden, heads.query(size), role="o", bias=bias)
    t.linear(f"{layer}.mlp.dense_h_to_4h", ffn, hidden, role="up", bias=bias)
    t.linear(f"{layer}.mlp.dense_4h_to_h", hidden, ffn, role="down", bias=bias)
    for norm in norms:
        t.norm(f"{layer}.{norm}", hidden, bias=True)
    t.norm("@ln_f", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, hidden, tied_to="@word_embeddings.weight" if tied else None)
    return t
