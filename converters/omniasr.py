"""Omnilingual ASR: wav2vec 2.0's encoder under names of its own, with a head that writes text or a language model.

Source: transformers ``models/omniasr/modeling_omniasr.py``, ``models/omniasr_ctc/modeling_omniasr_ctc.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, whole_projector
from tpshard.blocks.dense import mlp, norms
from tpshard.blocks.encdec import OUT
from tpshard.blocks.speech import (
    DENSE,
    PLACES,
    WAVE,
    ctc_head,
    encoder_attention,
    encoder_channels,
    encoder_heads,
)  # fmt: skip
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "omniasr"
USUAL = {"omniasr_audio": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                           "num_attention_heads": 16}}  # fmt: skip
MODEL_TYPES = ("omniasr", "omniasr_ctc", *USUAL)


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return _encoder(c)
    tower = part_of(c, "audio_config", model_type="omniasr_audio")
    width = tower.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    if c.model_type == "omniasr_ctc":
        t.include(table_of(tower), *(f"{at}audio_tower." for at in MODEL))
        ctc_head(t, c.with_usual(vocab_size=10288), width)
        return t
    text = language_config(c, "text_config", model_type="llama")
    include_language(t, text)
    include_tower(t, tower, "audio_tower", axes="audio_")
    whole_projector(t, "@multi_modal_projector", width, text.count("hidden_size"))
    return t


def _encoder(c: Config) -> Table:
    hidden = c.count("hidden_size")
    heads, size = encoder_heads(c, width=hidden)

    t = Table(c.count("num_hidden_layers"))
    t.whole_module("@subsampling", why=WAVE)
    t.whole_module("@encode_positions", why=PLACES)
    layer = "@layers.{layer}"
    encoder_attention(t, f"{layer}.attention", heads, size, hidden, names=OUT)
    mlp(t, f"{layer}.feed_forward", encoder_channels(c).each(), hidden, names=DENSE)
    norms(t, layer, ("layer_norm", "final_layer_norm"), hidden, bias=True)
    t.norm("@layer_norm", hidden, bias=True)
    return t
