"""Nyströmformer, YOSO and MRA: BERT's layers with attention that is approximated, each in its own way.

The approximations work head by head. Nyströmformer adds a convolution over the values, one filter a head, YOSO may.
Positions have an offset of two.
Source: transformers ``models/{nystromformer,yoso,mra}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import heads_of, vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, masked_head, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "nystromformer"
MODEL_TYPES = ("mra", "nystromformer", "yoso")


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)

    t = Table(c.count("num_hidden_layers"), prefixes=(f"{c.model_type}.", ""))
    embeddings(t, c, vocab, e.hidden, offset=2)
    encoder_layer(t, e)
    window = c.get("conv_kernel_size" if c.model_type == "nystromformer" else "conv_window")
    if window is not None and c.model_type != "mra":
        t.tensor(
            "@encoder.layer.{layer}.attention.self.conv.weight", heads_of(c).query(1), 1, window, 1, role="attn_head"
        )
    tied = c.flag("tie_word_embeddings", default=True)
    masked_head(t, e.hidden, e.hidden, vocab, tied_to="@embeddings.word_embeddings.weight" if tied else None)
    task_heads(t, e.hidden)
    return t
