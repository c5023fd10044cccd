"""BLOOM: q, k, v of one head lie together, head after head; ALiBi, whose slopes the model computes.

Source: transformers ``models/bloom/modeling_bloom.py`` (``_reshape``, ``view(..., heads, 3, head_dim)``).
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "bloom"
MODEL_TYPES = ("bloom",)


def table(c: Config) -> Table:
    c = c.with_usual(hidden_size=c.count("n_embed", "hidden_size"))
    hidden, count = c.count("hidden_size"), c.count("n_head", "num_attention_heads")
    heads, size = Heads("heads", count, count), c.head_dim(count)
    ffn = Units("ffn", 4 * hidden, noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(c.count("n_layer", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding("@word_embeddings", vocab, hidden)
    t.norm("@word_embeddings_layernorm", hidden, bias=True)
    layer = "@h.{layer}"
    t.linear(f"{layer}.self_attention.query_key_value", heads.grouped(size, size, size), hidden, role="qkv", bias=True)
    t.linear(f"{layer}.self_attention.dense", hidden, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", ffn, hidden, names=("dense_h_to_4h", "dense_4h_to_h"))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
    t.norm("@ln_f", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, hidden, tied_to="@word_embeddings.weight" if tied else None)
    return t
