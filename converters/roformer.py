"""RoFormer: BERT's layers with rotary positions, whose sinusoids files hold, and embeddings that may be narrower.

Source: transformers ``models/roformer/modeling_roformer.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import heads_of, vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, masked_head, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "roformer"
MODEL_TYPES = ("roformer",)


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    width = c.count("embedding_size", default=e.hidden)

    t = Table(c.count("num_hidden_layers"), prefixes=("roformer.", ""))
    embeddings(t, c, vocab, width, positions=False)
    if width != e.hidden:
        t.linear("@embeddings_project", e.hidden, width, role="embed_projection", bias=True)
    positions = c.count("max_position_embeddings", default=1536)
    size = c.head_dim(heads_of(c).query_heads)
    t.tensor("@encoder.embed_positions.weight", positions, size, role="position", optional=True)
    encoder_layer(t, e, cross=c.flag("add_cross_attention", default=False))
    tied = c.flag("tie_word_embeddings", default=True)
    masked_head(t, e.hidden, width, vocab, tied_to="@embeddings.word_embeddings.weight" if tied else None)
    task_heads(t, e.hidden)
    return t
