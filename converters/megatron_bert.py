"""Megatron's BERT: the norms before the blocks and one at the end, none over the embeddings.

Source: transformers ``models/megatron_bert/modeling_megatron_bert.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, masked_head, pooler, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "megatron_bert"
MODEL_TYPES = ("megatron-bert",)


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)

    t = Table(c.count("num_hidden_layers"), prefixes=("bert.", ""))
    embeddings(t, c, vocab, e.hidden, norm=None)
    encoder_layer(t, e, norms=("attention.ln", "ln"), cross=c.flag("add_cross_attention", default=False))
    t.norm("@encoder.ln", e.hidden, bias=True)
    pooler(t, e.hidden)
    tied = c.flag("tie_word_embeddings", default=True)
    masked_head(t, e.hidden, e.hidden, vocab, tied_to="@embeddings.word_embeddings.weight" if tied else None)
    t.linear("cls.seq_relationship", 2, e.hidden, role="pooler", bias=None, optional=True)
    task_heads(t, e.hidden)
    return t
