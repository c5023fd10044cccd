"""Codecs of sound that are convolutions alone: EnCodec and DAC. All of it stays whole on every rank.

Every channel of a convolution sees all of the one before, at every step of a wave; the models have 15 to 75 million
parameters and run once before or after a language model.
Source: transformers ``models/encodec/modeling_encodec.py``, ``models/dac/modeling_dac.py``.
"""

from __future__ import annotations

from tpshard.blocks.speech import WAVE
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "codec"
MODEL_TYPES = ("dac", "encodec")


def table(c: Config) -> Table:
    t = Table(0)
    for part in ("encoder", "decoder"):
        t.whole_module(part, why=WAVE)
    t.whole_module("quantizer", why="codebooks: every rank looks for the nearest of all codes")
    return t
