"""ALBERT: the layers of a group share one set of weights, after embeddings that are narrower.

Source: transformers ``models/albert/modeling_albert.py``; arXiv 1909.11942.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_of, layer_norms, masked_head, pooler, task_heads
from tpshard.config import Config
from tpshard.table import AFTER_SUM, Table

FAMILY = "albert"
MODEL_TYPES = ("albert",)


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    width = c.count("embedding_size", default=128)

    t = Table(c.count("num_hidden_groups", default=1), prefixes=("albert.", ""))
    embeddings(t, c, vocab, width)
    t.linear("@encoder.embedding_hidden_mapping_in", e.hidden, width, role="embed_projection", bias=True)
    for number in range(c.count("inner_group_num", default=1)):
        at = f"@encoder.albert_layer_groups.{{layer}}.albert_layers.{number}"
        names = ("query", "key", "value", "dense")
        attention(t, f"{at}.attention", e.q, e.kv, e.hidden, bias=True, out_bias=True, names=names)
        t.linear(f"{at}.ffn", e.ffn, e.hidden, role="up", bias=True)
        t.linear(f"{at}.ffn_output", e.hidden, e.ffn, role="down", bias=True)
        layer_norms(t, [f"{at}.attention.LayerNorm", f"{at}.full_layer_layer_norm"], e.hidden, note=AFTER_SUM)
    pooler(t, e.hidden, at="@pooler")
    tied = c.flag("tie_word_embeddings", default=True)
    masked_head(
        t, e.hidden, width, vocab, at="predictions", dense="dense", norm="LayerNorm",
        tied_to="@embeddings.word_embeddings.weight" if tied else None,
    )  # fmt: skip
    t.linear("sop_classifier.classifier", 2, e.hidden, role="pooler", bias=None, optional=True)
    task_heads(t, e.hidden)
    return t
