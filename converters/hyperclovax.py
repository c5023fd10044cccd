"""HyperCLOVA X: Llama's blocks; with ``use_post_norm`` what attention and MLP give is normalised as well.

Source: transformers ``models/hyperclovax/modeling_hyperclovax.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "hyperclovax"
MODEL_TYPES = ("hyperclovax",)
USUAL = {
    "hyperclovax": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                    "num_attention_heads": 32},
}  # fmt: skip


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)

    t = decoder(c)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    if c.flag("use_post_norm", default=True):
        norms(t, layer, ("post_norm1", "post_norm2"), hidden)
    return t
