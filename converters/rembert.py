"""RemBERT: BERT's layers between narrow embeddings and a wide head, which are not tied.

Source: transformers ``models/rembert/modeling_rembert.py``; arXiv 2010.12821.
"""

from __future__ import annotations

from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, masked_head, pooler, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "rembert"
MODEL_TYPES = ("rembert",)


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    first, last = c.count("input_embedding_size", default=256), c.count("output_embedding_size", default=1664)

    t = Table(c.count("num_hidden_layers"), prefixes=("rembert.", ""))
    embeddings(t, c, vocab, first)
    t.linear("@encoder.embedding_hidden_mapping_in", e.hidden, first, role="embed_projection", bias=True)
    encoder_layer(t, e, cross=c.flag("add_cross_attention", default=False))
    pooler(t, e.hidden)
    masked_head(t, e.hidden, last, vocab, dense="dense", norm="LayerNorm", tied_to=None)
    task_heads(t, e.hidden)
    return t
