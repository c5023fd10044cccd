"""DistilBERT: BERT's layers with names of their own, no token types, no pooler.

Source: transformers ``models/distilbert/modeling_distilbert.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import attention, mlp, vocabulary_of
from tpshard.blocks.encoders import embeddings, layer_norms, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "distilbert"
MODEL_TYPES = ("distilbert",)


def table(c: Config) -> Table:
    hidden, count, vocab = c.count("dim", "hidden_size"), c.count("n_heads", "num_attention_heads"), vocabulary_of(c)
    heads, size = Heads("heads", count, count), c.with_usual(hidden_size=hidden).head_dim(count)
    ffn = Units("ffn", c.count("hidden_dim"), noun="feed-forward channels").each()

    t = Table(c.count("n_layers", "num_hidden_layers"), prefixes=("distilbert.", ""))
    embeddings(t, c, vocab, hidden, types=False)
    layer = "@transformer.layer.{layer}"
    attention(
        t, f"{layer}.attention", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
        names=("q_lin", "k_lin", "v_lin", "out_lin"),
    )  # fmt: skip
    mlp(t, f"{layer}.ffn", ffn, hidden, names=("lin1", "lin2"))
    layer_norms(t, [f"{layer}.sa_layer_norm", f"{layer}.output_layer_norm"], hidden)
    with t.stack(optional=True):
        t.linear("vocab_transform", hidden, hidden, role="head_projection", bias=True)
        t.norm("vocab_layer_norm", hidden, bias=True)
        t.tensor("vocab_projector.bias", vocab, role="head_bias")
        t.tensor("vocab_projector.weight", vocab, hidden, role="head", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("vocab_projector.weight", "@embeddings.word_embeddings.weight")
    t.linear("pre_classifier", hidden, hidden, role="pooler", bias=None, optional=True)
    task_heads(t, hidden)
    return t
