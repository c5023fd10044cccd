"""Llama's attention over an MLP without a gate (``up_proj``, ``down_proj``): Arcee, Jais 2, Nemotron.

Jais 2 and Nemotron have LayerNorms with biases, Arcee RMS norms.
Source: transformers ``models/{arcee,jais2,nemotron}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, heads_of, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "arcee"
MODEL_TYPES = ("arcee", "jais2", "nemotron")


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads)
    biased = c.model_type == "jais2"  # unless the config says otherwise
    bias, norm_bias = c.flag("attention_bias", default=biased), c.model_type != "arcee"

    t = decoder(c, norm_bias=norm_bias)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    mlp(
        t, f"{layer}.mlp", channels_of(c), hidden,
        bias=c.flag("mlp_bias", default=biased), names=("up_proj", "down_proj"),
    )  # fmt: skip
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=norm_bias)
    return t
