"""EXAONE 4: norms after attention and MLP instead of before, and norms of q and k.

Source: transformers ``models/exaone4/modeling_exaone4.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "exaone4"
MODEL_TYPES = ("exaone4",)
USUAL = {
    "exaone4": {"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32},
}  # fmt: skip


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads)

    t = decoder(c)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden)
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("post_attention_layernorm", "post_feedforward_layernorm"), hidden)
    return t
