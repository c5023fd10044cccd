"""Kolibri: experts in every layer, norms before and after attention and MLP, the router's correction apart from it.

Source: transformers ``models/kolibri1/modeling_kolibri1.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, decoder, expert_channels, heads_of, norms
from tpshard.blocks.experts import mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "kolibri1"
MODEL_TYPES = ("kolibri1",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=4)
    size, count = c.head_dim(heads.query_heads, default=128), c.count("num_local_experts", "num_experts")

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden)
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    norms(t, layer, ("input_layernorm", "post_attn_norm", "post_attention_layernorm", "post_ffn_norm"), hidden)
    mixture(
        t, f"{layer}.mlp", count, expert_channels(c, "moe_intermediate_size"), hidden,
        shared=shared_channels(c.count("shared_expert_intermediate_size", default=512)),
    )  # fmt: skip
    t.tensor(f"{layer}.moe.router.expert_bias", count, role="router_bias")
    return t
