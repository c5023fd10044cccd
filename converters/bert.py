"""BERT as an encoder: biases everywhere, the norms after the sums, positions and the pooler whole.

The heads of pre-training are cut where they are there: the decoder along the vocabulary, the rest whole.
Source: transformers ``models/bert/modeling_bert.py``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.partition import Heads, Padded, Units
from tpshard.table import Table

FAMILY = "bert"
MODEL_TYPES = ("bert",)


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", query_heads, query_heads), c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(layers=c.count("num_hidden_layers"), prefixes=("bert.", ""))
    t.embedding("@embeddings.word_embeddings", vocab, hidden)
    t.embedding("@embeddings.position_embeddings", c.count("max_position_embeddings"), hidden, role="position")
    t.embedding("@embeddings.token_type_embeddings", c.count("type_vocab_size", default=2), hidden, role="position")
    t.tensor("@embeddings.position_ids", 1, None, role="buffer", optional=True)  # files before 2023
    t.norm("@embeddings.LayerNorm", hidden, bias=True)
    layer = "@encoder.layer.{layer}"
    t.linear(f"{layer}.attention.self.query", q, hidden, role="q", bias=True)
    t.linear(f"{layer}.attention.self.key", kv, hidden, role="k", bias=True)
    t.linear(f"{layer}.attention.self.value", kv, hidden, role="v", bias=True)
    t.linear(f"{layer}.attention.output.dense", hidden, q, role="o", bias=True)
    t.norm(f"{layer}.attention.output.LayerNorm", hidden, bias=True)
    t.linear(f"{layer}.intermediate.dense", ffn, hidden, role="up", bias=True)
    t.linear(f"{layer}.output.dense", hidden, ffn, role="down", bias=True)
    t.norm(f"{layer}.output.LayerNorm", hidden, bias=True)
    t.linear("@pooler.dense", hidden, hidden, role="pooler", bias=None, optional=True)
    t.linear("cls.predictions.transform.dense", hidden, hidden, role="head_projection", bias=None, optional=True)
    t.tensor("cls.predictions.transform.LayerNorm.weight", hidden, role="norm", optional=True)
    t.tensor("cls.predictions.transform.LayerNorm.bias", hidden, role="norm_bias", optional=True)
    tied = c.flag("tie_word_embeddings", default=True)
    table_of_words = "@embeddings.word_embeddings.weight" if tied else None
    t.head("cls.predictions.decoder", vocab, hidden, bias=None, tied_to=table_of_words)
    t.tensor("cls.predictions.bias", vocab, role="head_bias", optional=True)  # the decoder's bias by its other name
    t.linear("cls.seq_relationship", 2, hidden, role="pooler", bias=None, optional=True)
    return t
