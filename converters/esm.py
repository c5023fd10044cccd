"""ESM-1b and ESM-2, encoders of proteins: norms before the blocks, a small head that finds contacts in attention maps.

Source: transformers ``models/esm/modeling_esm.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import heads_of, vocabulary_of
from tpshard.blocks.encoders import encoder_layer, encoder_of, layer_norms, pooler, roberta_head, task_heads
from tpshard.config import Config
from tpshard.table import BEHIND_PADDING, Table

FAMILY = "esm"
MODEL_TYPES = ("esm",)


def table(c: Config) -> Table:
    vocab, layers = vocabulary_of(c), c.count("num_hidden_layers")
    e = encoder_of(c, vocab)

    t = Table(layers, prefixes=("esm.", ""))
    t.embedding("@embeddings.word_embeddings", vocab, e.hidden)
    positions = "@embeddings.position_embeddings.weight"  # with rotary positions unused, and some files hold it still
    rotary = c.get("position_embedding_type", default="absolute") == "rotary"
    most = c.count("max_position_embeddings")
    t.tensor(positions, most, e.hidden, role="position", optional=rotary, note=BEHIND_PADDING)
    t.tensor("@embeddings.position_ids", 1, None, role="buffer", optional=True)  # files before 2023
    if c.flag("emb_layer_norm_before", default=False):
        layer_norms(t, ["@embeddings.layer_norm"], e.hidden)
    encoder_layer(t, e, norms=("attention.LayerNorm", "LayerNorm"), cross=c.flag("add_cross_attention", default=False))
    inv_freq = "@encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"
    t.tensor(inv_freq, None, role="buffer", optional=True)  # files of 2022
    layer_norms(t, ["@encoder.emb_layer_norm_after"], e.hidden)
    maps = layers * heads_of(c).query_heads
    t.linear("@contact_head.regression", 1, maps, role="pooler", bias=None, optional=True)
    pooler(t, e.hidden)
    roberta_head(t, c, e.hidden, vocab, bias_after=True)
    task_heads(t, e.hidden)
    return t
