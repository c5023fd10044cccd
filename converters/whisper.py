"""Whisper: a decoder of fairseq over a speech encoder; keys have no bias, positions are stored.

Source: transformers ``models/whisper/modeling_whisper.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.encdec import layer_of, side, side_axes
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "whisper"
MODEL_TYPES = ("whisper",)


def table(c: Config) -> Table:
    width, vocab = c.count("d_model"), Padded("vocab", c.count("vocab_size")).each()
    t = Table(0, prefixes=("model.", ""))
    tied = c.flag("tie_word_embeddings", default=True)
    t.shared("@decoder.embed_tokens.weight", heads=("proj_out.weight",) if tied else (), vocab=vocab, width=width)
    if not tied:
        t.tensor("proj_out.weight", vocab, width, role="head", optional=True)
    for name, count in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
        axes = side_axes(c, name, width)
        with side(c, t, name, c.count(f"{name}_layers")) as layer:
            layer_of(t, layer, axes, width, cross=width if name == "decoder" else None, key_bias=False)
            if name == "encoder":
                t.whole("@encoder.embed_positions.weight", c.count(count), width, why="places of the frames of a sound")
            else:
                t.embedding("@decoder.embed_positions", c.count(count), width, role="position")
            t.norm(f"@{name}.layer_norm", width, bias=True)
            if name == "encoder":
                why = "two small convolutions along time, whose channels are all that the first layer sees"
                for conv, into in (("conv1", c.count("num_mel_bins")), ("conv2", width)):
                    t.whole(f"@encoder.{conv}.weight", width, into, 3, why=why)
                    t.whole(f"@encoder.{conv}.bias", width, why=why)
    return t
