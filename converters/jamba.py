"""Jamba: Mamba-1 with norms on time step, B and C, attention in between, experts in every other layer.

Source: transformers ``models/jamba/modeling_jamba.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import attention, channels_of, decoder, experts, gated_mlp, heads_of, norms
from tpshard.blocks.mixers import mamba1, time_step_rank, widened
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "jamba"
MODEL_TYPES = ("jamba",)


def table(c: Config) -> Table:
    hidden, heads, ffn = c.count("hidden_size"), heads_of(c, default_kv=8), channels_of(c)
    size, count = c.head_dim(heads.query_heads), c.count("num_experts", "num_local_experts", default=16)
    channels = Units("ssm_channels", widened(c, "mamba_expand"), noun="state-space channels").each()
    state, rank = c.count("mamba_d_state", default=16), time_step_rank(c, "mamba_dt_rank")

    t = decoder(c, experts=count, norm="final_layernorm")
    layer = "@layers.{layer}"
    every = frozenset(range(t.layers))
    attentive = _periodic(c, "attn_layer", t.layers, first=4, every=8)
    sparse = _periodic(c, "expert_layer", t.layers, first=1, every=2)
    with t.only(attentive):
        attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden)
    with t.only(every - attentive):
        mamba1(
            t, f"{layer}.mamba", channels, hidden, state=state, rank=rank,
            kernel=c.count("mamba_d_conv", default=4), bias=c.flag("mamba_proj_bias", default=False),
            conv_bias=c.flag("mamba_conv_bias", default=True),
        )  # fmt: skip
        for name, width in (("dt", rank), ("b", state), ("c", state)):
            t.norm(f"{layer}.mamba.{name}_layernorm", width)
    sparse = sparse if count > 1 else frozenset()
    with t.only(every - sparse):
        gated_mlp(t, f"{layer}.feed_forward", ffn, hidden)
    with t.only(sparse):
        t.linear(f"{layer}.feed_forward.router", count, hidden, role="router")
        experts(t, f"{layer}.feed_forward.experts", count, ffn, hidden)
        t.one_of("experts", "stacked experts")
    norms(t, layer, ("input_layernorm", "pre_ff_layernorm"), hidden)
    return t


def _periodic(c: Config, what: str, layers: int, *, first: int, every: int) -> frozenset[int]:
    """The layers from ``WHAT_offset`` in steps of ``WHAT_period``."""
    return frozenset(range(c.number(f"{what}_offset", default=first), layers, c.count(f"{what}_period", default=every)))
