"""VaultGemma: Gemma 2 with norms before attention and MLP only.

Source: transformers ``models/vaultgemma/modeling_vaultgemma.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "vaultgemma"
MODEL_TYPES = ("vaultgemma",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=4)
    size, bias = c.head_dim(heads.query_heads, default=256), c.flag("attention_bias", default=False)

    t = decoder(c, tied=True)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "pre_feedforward_layernorm"), hidden)
    return t
