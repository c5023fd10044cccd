"""Pixtral's vision tower: Llama's blocks without biases, under names of its own, positions by rotation.

Source: transformers ``models/pixtral/modeling_pixtral.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.dense import attention, channels_of, gated_mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "pixtral"
MODEL_TYPES = ("pixtral",)
USUAL = {
    "pixtral": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                "num_channels": 3, "patch_size": 16},
}  # fmt: skip


def table(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", count, count), c.head_dim(count)
    patch = c.count("patch_size")

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@patch_conv.weight", hidden, c.count("num_channels", default=3), patch, patch, role="vision")
    t.norm("@ln_pre", hidden)
    layer = "@transformer.layers.{layer}"
    attention(t, f"{layer}.attention", heads.query(size), heads.kv(size), hidden)
    gated_mlp(t, f"{layer}.feed_forward", channels_of(c), hidden)
    norms(t, layer, ("attention_norm", "ffn_norm"), hidden)
    return t
