"""ALIGN: BERT beside EfficientNet, and one matrix to the width of what the convolutions pool.

EfficientNet is convolutions with batch norms throughout: whole on every rank.
Source: transformers ``models/align/modeling_align.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import whole_projector
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, pooler
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "align"
USUAL = {
    "align_text_model": {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                         "intermediate_size": 3072},
}  # fmt: skip
MODEL_TYPES = ("align", "align_text_model")


def table(c: Config) -> Table:
    if c.model_type == "align_text_model":
        return _text(c)
    text = part_of(c, "text_config", model_type="align_text_model")
    t = Table(0)
    t.include(table_of(text), ("text_model.", "text_model."), axes="text_")
    t.whole_module("vision_model", why="EfficientNet: convolutions and batch norms over images")
    whole_projector(t, "text_projection", text.count("hidden_size"), c.count("projection_dim", default=640))
    t.whole("temperature", why="one number for all pairs of texts and images")
    return t


def _text(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)

    t = Table(c.count("num_hidden_layers"))
    embeddings(t, c, vocab, e.hidden)
    encoder_layer(t, e)
    pooler(t, e.hidden)
    return t
