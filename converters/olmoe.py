"""OLMoE and FlexOlmo: experts in every layer, q and k normalised over all heads at once.

Source: transformers ``models/olmoe/modeling_olmoe.py``, ``models/flex_olmo/modeling_flex_olmo.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, decoder, expert_channels, heads_of, norms
from tpshard.blocks.experts import mixture
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "olmoe"
MODEL_TYPES = ("flex_olmo", "olmoe")


def table(c: Config) -> Table:
    hidden, heads, bias = c.count("hidden_size"), heads_of(c), c.flag("attention_bias", default=False)
    size, count = c.head_dim(heads.query_heads), c.count("num_experts", "num_local_experts")
    q, kv = heads.query(size), heads.kv(size)

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", q, kv, hidden, bias=bias, out_bias=bias)
    t.norm(f"{layer}.self_attn.q_norm", q)
    t.norm(f"{layer}.self_attn.k_norm", kv)
    mixture(t, f"{layer}.mlp", count, expert_channels(c, "intermediate_size"), hidden)
    before = "post_feedforward_layernorm" if c.model_type == "flex_olmo" else "input_layernorm"
    norms(t, layer, (before, "post_attention_layernorm"), hidden)
    return t
