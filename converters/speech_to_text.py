"""Speech2Text: fairseq's encoder-decoder behind two convolutions with gates; positions are computed.

Source: transformers ``models/speech_to_text/modeling_speech_to_text.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.encdec import layer_of, side, side_axes
from tpshard.blocks.speech import WAVE
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "speech_to_text"
MODEL_TYPES = ("speech_to_text",)


def table(c: Config) -> Table:
    width, vocab = c.count("d_model"), Padded("vocab", c.count("vocab_size")).each()
    tied = c.flag("tie_word_embeddings", default=True)

    t = Table(0, prefixes=("model.", ""))
    t.shared("@decoder.embed_tokens.weight", heads=("lm_head.weight",) if tied else (), vocab=vocab, width=width)
    if not tied:
        t.tensor("lm_head.weight", vocab, width, role="head", optional=True)
    for name in ("encoder", "decoder"):
        axes = side_axes(c, name, width)
        with side(c, t, name, c.count(f"{name}_layers")) as layer:
            layer_of(t, layer, axes, width, cross=width if name == "decoder" else None)
            t.norm(f"@{name}.layer_norm", width, bias=True)
            if name == "encoder":
                t.whole_module("@encoder.conv", why=WAVE)
            t.tensor(f"@{name}.embed_positions.weights", None, width, role="position", optional=True)  # files of 2021
    return t
