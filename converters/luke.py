"""LUKE: RoBERTa with entities beside the words, and queries for each pairing of the two.

Entities have a vocabulary of their own, of which embedding and head are cut as those of the words are.
Source: transformers ``models/luke/modeling_luke.py``; arXiv 2010.01057.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import (
    Encoder,
    embeddings,
    encoder_layer,
    encoder_of,
    layer_norms,
    masked_head,
    pooler,
    roberta_head,
    task_heads,
)
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "luke"
MODEL_TYPES = ("luke",)


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)

    t = Table(c.count("num_hidden_layers"), prefixes=("luke.", ""))
    embeddings(t, c, vocab, e.hidden)
    encoder_layer(t, e)
    if c.flag("use_entity_aware_attention", default=True):
        for pair in ("w2e", "e2w", "e2e"):
            t.linear(f"@encoder.layer.{{layer}}.attention.self.{pair}_query", e.q, e.hidden, role="q", bias=True)
    pooler(t, e.hidden)
    _entities(t, c, e)
    roberta_head(t, c, e.hidden, vocab)
    task_heads(t, e.hidden)
    return t


def _entities(t: Table, c: Config, e: Encoder) -> None:
    width = c.count("entity_emb_size", default=256)
    entities = Padded("entities", c.count("entity_vocab_size", default=500_000), noun="entities").each()
    at = "@entity_embeddings"
    t.embedding(f"{at}.entity_embeddings", entities, width)
    if width != e.hidden:
        t.linear(f"{at}.entity_embedding_dense", e.hidden, width, role="embed_projection")
    t.embedding(f"{at}.position_embeddings", c.count("max_position_embeddings"), e.hidden, role="position")
    t.embedding(f"{at}.token_type_embeddings", c.count("type_vocab_size", default=2), e.hidden, role="position")
    layer_norms(t, [f"{at}.LayerNorm"], e.hidden)
    masked_head(t, e.hidden, width, entities, at="entity_predictions", tied_to=f"{at}.entity_embeddings.weight")
