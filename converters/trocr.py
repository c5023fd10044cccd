"""TrOCR's decoder: BART's, attending to what a vision encoder makes, which may be of another width.

Source: transformers ``models/trocr/modeling_trocr.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.encdec import layer_of, side_axes
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "trocr"
MODEL_TYPES = ("trocr",)


def table(c: Config) -> Table:
    width, vocab = c.count("d_model", "hidden_size"), Padded("vocab", c.count("vocab_size")).each()
    t = Table(c.count("decoder_layers"), prefixes=("model.decoder.", "decoder."))
    tied = c.flag("tie_word_embeddings", default=True)
    heads = ("output_projection.weight",) if tied else ()
    t.shared("@embed_tokens.weight", heads=heads, vocab=vocab, width=width)
    if not tied:
        t.tensor("output_projection.weight", vocab, width, role="head")
    cross = c.count("cross_attention_hidden_size", default=width)
    layer_of(t, "@layers.{layer}", side_axes(c, "decoder", width), width, cross=cross)
    if c.flag("use_learned_position_embeddings", default=True):
        t.embedding("@embed_positions", c.count("max_position_embeddings") + 2, width, role="position")
    if c.flag("layernorm_embedding", default=True):
        t.norm("@layernorm_embedding", width, bias=True)
    return t
