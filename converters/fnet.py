"""FNet: BERT's layers with Fourier transforms in place of attention; the transforms have no weights.

A transform mixes all channels of the residual stream, which every rank has, so nothing is summed for it.
Source: transformers ``models/fnet/modeling_fnet.py``; arXiv 2105.03824.
"""

from __future__ import annotations

from tpshard.blocks.dense import channels_of, mlp, vocabulary_of
from tpshard.blocks.encoders import embeddings, layer_norms, masked_head, pooler, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "fnet"
MODEL_TYPES = ("fnet",)


def table(c: Config) -> Table:
    hidden, vocab = c.count("hidden_size"), vocabulary_of(c)

    t = Table(c.count("num_hidden_layers"), prefixes=("fnet.", ""))
    embeddings(t, c.with_usual(type_vocab_size=4), vocab, hidden)
    t.linear("@embeddings.projection", hidden, hidden, role="embed_projection", bias=True)
    layer = "@encoder.layer.{layer}"
    mlp(t, layer, channels_of(c), hidden, names=("intermediate.dense", "output.dense"))
    layer_norms(t, [f"{layer}.fourier.output.LayerNorm", f"{layer}.output.LayerNorm"], hidden)
    pooler(t, hidden)
    tied = c.flag("tie_word_embeddings", default=True)
    masked_head(t, hidden, hidden, vocab, tied_to="@embeddings.word_embeddings.weight" if tied else None)
    t.linear("cls.seq_relationship", 2, hidden, role="pooler", bias=None, optional=True)
    task_heads(t, hidden)
    return t
