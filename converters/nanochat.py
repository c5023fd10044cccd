"""nanochat: no norm has weights, the MLP has two matrices.

Source: transformers ``models/nanochat/modeling_nanochat.py`` (``NanoChatRMSNorm``).
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, heads_of, mlp
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "nanochat"
MODEL_TYPES = ("nanochat",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)

    t = decoder(c, norm=None)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=False)
    return t
