"""BertGeneration: BERT's layers as encoder or decoder, without token types, with a bare bias beside the tied head.

Source: transformers ``models/bert_generation/modeling_bert_generation.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "bert_generation"
MODEL_TYPES = ("bert-generation",)


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)

    t = Table(c.count("num_hidden_layers"), prefixes=("bert.", ""))
    embeddings(t, c, vocab, e.hidden, types=False)
    encoder_layer(t, e, cross=c.flag("add_cross_attention", default=False))
    with t.stack(optional=True):
        t.tensor("lm_head.decoder.weight", vocab, e.hidden, role="head", optional=True)
        t.tensor("lm_head.decoder.bias", vocab, role="head_bias", optional=True)
        t.tensor("lm_head.bias", vocab, role="head_bias", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("lm_head.decoder.weight", "@embeddings.word_embeddings.weight")
    return t
