"""Zamba 1: Mamba-1 split into heads, and before some layers one transformer block that they all share.

The shared block stands in the files in the first layer that uses it. Attention reads the hidden state and the
embedding side by side. The rows of ``in_proj`` alternate between x and z. Every head has its own ``x_proj``; there are
two, so it is the channels inside every head that are cut.
Source: transformers ``models/zamba/modeling_zamba.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpshard.axes import Units
from tpshard.blocks.dense import channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.blocks.mixers import RECURRENT, convolution, layers_of, time_step_rank, widened
from tpshard.config import Config
from tpshard.table import NEEDS_GATHER, Table

FAMILY = "zamba"
MODEL_TYPES = ("zamba",)


def table(c: Config) -> Table:
    hidden = c.count("hidden_size")

    t = decoder(c, norm="final_layernorm", tied=True)
    layer = "@layers.{layer}"
    types = c.with_usual(layers_block_type=_usual(c, t.layers)).listed("layers_block_type", t.layers)
    hybrid = sorted(layers_of(types, "hybrid"))
    for layers, at in ((layers_of(types, *RECURRENT), layer), (hybrid, f"{layer}.mamba_decoder")):
        with t.only(layers):
            _mixer(t, c, f"{at}.mamba", hidden)
            t.norm(f"{at}.input_layernorm", hidden)
    with t.only(hybrid):
        joint = Units("joint", hidden, noun="channels between attention and state space", or_whole=True).each()
        t.linear(f"{layer}.linear", joint, hidden, role="gathered", note=NEEDS_GATHER)
    with t.only(hybrid[:1]):
        _shared(t, c, f"{layer}.shared_transf", hidden)
    with t.only(hybrid[1:]), t.block("repeated"):
        _shared(t, c, f"{layer}.shared_transf", hidden)
    return t


def _shared(t: Table, c: Config, at: str, hidden: int) -> None:
    """The transformer block that several layers share."""
    heads = heads_of(c)
    size = c.count("attention_head_dim", default=2 * hidden // heads.query_heads)
    into = c.count("attention_hidden_size", default=2 * hidden)
    t.norm(f"{at}.input_layernorm", into)
    for name, rows in (("q", heads.query(size)), ("k", heads.kv(size)), ("v", heads.kv(size))):
        t.linear(f"{at}.self_attn.{name}_proj", rows, into, role=name)
    t.linear(f"{at}.self_attn.o_proj", hidden, heads.query(size), role="o")
    norms(t, at, ("pre_ff_layernorm",), hidden)
    gated_mlp(t, f"{at}.feed_forward", channels_of(c), hidden)


def _mixer(t: Table, c: Config, at: str, hidden: int) -> None:
    """Mamba-1's mixer with ``[heads, ...]`` tensors in place of ``x_proj`` and ``dt_proj``."""
    heads = c.count("n_mamba_heads", default=2)
    channels = Units("ssm_channels", widened(c, "mamba_expand") // heads, noun="channels of a state-space head")
    one, every = channels.each(), channels.each() * heads
    state, rank = c.count("mamba_d_state", default=16), time_step_rank(c, "mamba_dt_rank")
    bias = c.flag("mamba_proj_bias", default=False)
    t.linear(f"{at}.in_proj", channels.each(2) * heads, hidden, role="ssm_in", bias=bias)
    convolution(
        t, f"{at}.conv1d", every, c.count("mamba_d_conv", default=4), role="ssm_conv",
        bias=c.flag("mamba_conv_bias", default=True),
    )  # fmt: skip
    t.tensor(f"{at}.x_proj_weight", heads, rank + 2 * state, one, role="ssm_x")
    t.tensor(f"{at}.dt_proj_weight", heads, one, rank, role="ssm_dt")
    t.tensor(f"{at}.dt_proj_bias", heads, one, role="ssm_dt_bias")
    t.tensor(f"{at}.A_log", heads, one, state, role="ssm_head")
    t.tensor(f"{at}.D", heads, one, role="ssm_head")
    t.linear(f"{at}.out_proj", hidden, every, role="ssm_out", bias=bias)


def _usual(c: Config, layers: int) -> Sequence[str]:
    period, offset = c.count("attn_layer_period", default=6), c.number("attn_layer_offset", default=4)
    rest = ["hybrid" if number % period == offset else "mamba" for number in range(max(0, layers - 3))]
    return ["mamba", "mamba", "hybrid", *rest][:layers]
