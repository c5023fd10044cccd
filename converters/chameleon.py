"""Chameleon: images are tokens like words; q and k are normalised with weights and biases for every head.

What makes tokens of an image (``vqmodel``) is a convolutional autoencoder, whole.
Source: transformers ``models/chameleon/modeling_chameleon.py`` (``ChameleonLayerNorm``).
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "chameleon"
MODEL_TYPES = ("chameleon",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)

    t = decoder(c)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    for part in ("weight", "bias"):
        t.tensor(f"{layer}.self_attn.q_norm.{part}", heads.query(1), size, role="attn_head")
        t.tensor(f"{layer}.self_attn.k_norm.{part}", heads.kv(1), size, role="attn_head")
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    t.whole_module("@vqmodel", why="convolutions that make tokens of images")
    return t
