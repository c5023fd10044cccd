"""Fuyu: patches of the image go through one matrix into Persimmon; there is no tower.

Source: transformers ``models/fuyu/modeling_fuyu.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, language_config
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "fuyu"
MODEL_TYPES = ("fuyu",)


def table(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="persimmon")
    hidden, patch = text.count("hidden_size"), c.count("patch_size", default=30)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    values = patch * patch * c.count("num_channels", default=3)
    t.linear("@vision_embed_tokens", hidden, values, role="vision", bias=True)
    return t
