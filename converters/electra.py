"""ELECTRA: BERT's layers after embeddings that may be narrower; the generator's head goes back to their width.

Source: transformers ``models/electra/modeling_electra.py``; arXiv 2003.10555.
"""

from __future__ import annotations

from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, layer_norms, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "electra"
MODEL_TYPES = ("electra",)


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    width = c.count("embedding_size", default=128)

    t = Table(c.count("num_hidden_layers"), prefixes=("electra.", ""))
    embeddings(t, c, vocab, width)
    if width != e.hidden:
        t.linear("@embeddings_project", e.hidden, width, role="embed_projection", bias=True)
    encoder_layer(t, e, cross=c.flag("add_cross_attention", default=False))
    with t.stack(optional=True):
        t.linear("generator_predictions.dense", width, e.hidden, role="head_projection", bias=True)
        layer_norms(t, ["generator_predictions.LayerNorm"], width)
        t.tensor("generator_lm_head.bias", vocab, role="head_bias")
        t.tensor("generator_lm_head.weight", vocab, width, role="head", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("generator_lm_head.weight", "@embeddings.word_embeddings.weight")
    for name, rows in (("dense", e.hidden), ("dense_prediction", 1)):  # which words the generator has put in
        t.linear(f"discriminator_predictions.{name}", rows, e.hidden, role="pooler", bias=None, optional=True)
    task_heads(t, e.hidden)
    return t
