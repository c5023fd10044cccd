"""The audio spectrogram transformer: a ViT over patches of a spectrogram, with two tokens of its own.

Source: transformers ``models/audio_spectrogram_transformer/modeling_audio_spectrogram_transformer.py``.
"""

from __future__ import annotations

from tpshard.blocks.speech import AFTER, encoder_channels, encoder_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "audio_spectrogram_transformer"
MODEL_TYPES = ("audio-spectrogram-transformer",)


def table(c: Config) -> Table:
    hidden, bias = c.count("hidden_size", default=768), c.flag("qkv_bias", default=True)
    heads, size = encoder_heads(c, width=hidden)
    ffn = encoder_channels(c).each()

    t = Table(c.count("num_hidden_layers"), prefixes=("audio_spectrogram_transformer.", ""))
    t.whole_module("@embeddings", why="patches, tokens and positions, which every rank looks up and adds")
    layer = "@encoder.layer.{layer}"
    at = f"{layer}.attention.attention"
    t.linear(f"{at}.query", heads.query(size), hidden, role="q", bias=bias)
    t.linear(f"{at}.key", heads.kv(size), hidden, role="k", bias=bias)
    t.linear(f"{at}.value", heads.kv(size), hidden, role="v", bias=bias)
    t.linear(f"{layer}.attention.output.dense", hidden, heads.query(size), role="o", bias=True)
    t.linear(f"{layer}.intermediate.dense", ffn, hidden, role="up", bias=True)
    t.linear(f"{layer}.output.dense", hidden, ffn, role="down", bias=True)
    for norm in ("layernorm_before", "layernorm_after"):
        t.norm(f"{layer}.{norm}", hidden, bias=True)
    t.norm("@layernorm", hidden, bias=True)
    t.whole_module("classifier", why=AFTER, optional=True)
    return t
