"""GPT-BigCode (SantaCoder, StarCoder): GPT-2's names on ordinary output x input matrices.

With ``multi_query``: all query heads, then the one k and the one v. Without: q, k, v of one head together.
Source: transformers ``models/gpt_bigcode/modeling_gpt_bigcode.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "gpt_bigcode"
MODEL_TYPES = ("gpt_bigcode",)


def table(c: Config) -> Table:
    hidden, query_heads = c.count("n_embd", "hidden_size"), c.count("n_head", "num_attention_heads")
    size = c.head_dim(query_heads)
    if c.flag("multi_query", default=True):
        heads = Heads("heads", query_heads, 1)
        qkv = heads.query(size) + heads.kv(size) * 2
    else:
        heads = Heads("heads", query_heads, query_heads)
        qkv = heads.grouped(size, size, size)
    ffn = Units("ffn", c.count("n_inner", default=4 * hidden), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(layers=c.count("n_layer", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding("@wte", vocab, hidden)
    t.embedding("@wpe", c.count("n_positions", "max_position_embeddings"), hidden, role="position")
    layer = "@h.{layer}"
    t.linear(f"{layer}.attn.c_attn", qkv, hidden, role="qkv", bias=True)
    t.linear(f"{layer}.attn.c_proj", hidden, heads.query(size), role="o", bias=True)
    t.linear(f"{layer}.mlp.c_fc", ffn, hidden, role="up", bias=True)
    t.linear(f"{layer}.mlp.c_proj", hidden, ffn, role="down", bias=True)
    t.norm(f"{layer}.ln_1", hidden, bias=True)
    t.norm(f"{layer}.ln_2", hidden, bias=True)
    t.norm("@ln_f", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, hidden, tied_to="@wte.weight" if tied else None)
    return t
