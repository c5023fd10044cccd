"""Zamba 2: Mamba-2 throughout, and before some layers one of a few shared transformer blocks.

A shared block stands in the files in the first layer that uses it; the others repeat it, and low-rank adapters
make the difference, one for every layer that uses the block, all of them beside the block. Attention reads the
hidden state and the embedding side by side.
Source: transformers ``models/zamba2/modeling_zamba2.py``.
"""

from __future__ import annotations

from tpshard.blocks import decoder, fused_mlp, norms
from tpshard.config import Config
from tpshard.mixers import RECURRENT, layers_of, mamba2, state_heads, widened
from tpshard.partition import Heads, Units
from tpshard.table import NEEDS_GATHER, Table

FAMILY = "zamba2"
MODEL_TYPES = ("zamba2",)
USUAL = "m" + ("mmmmmh" * 7) + "mmmmhmmmhmm"  # of the config class: mamba, hybrid


def table(c: Config) -> Table:
    hidden = c.count("hidden_size")
    state = state_heads(c.count("n_mamba_heads", default=8), c.count("mamba_ngroups", default=1))
    bias = c.flag("add_bias_linear", default=False)

    t = decoder(c, norm="final_layernorm", tied=True)
    layer = "@layers.{layer}"
    usual = ["hybrid" if letter == "h" else "mamba" for letter in USUAL]
    types = c.with_usual(layers_block_type=usual).listed("layers_block_type", t.layers)
    hybrid = sorted(layers_of(types, "hybrid"))
    for layers, at in ((layers_of(types, *RECURRENT), layer), (hybrid, f"{layer}.mamba_decoder")):
        with t.only(layers):
            mamba2(
                t, f"{at}.mamba", state, hidden, size=widened(c, "mamba_expand") // state.query_heads,
                state=c.count("mamba_d_state", default=64), kernel=c.count("mamba_d_conv", default=4), bias=bias,
            )  # fmt: skip
            t.norm(f"{at}.input_layernorm", hidden)
    with t.only(hybrid):
        joint = Units("joint", hidden, noun="channels between attention and state space", or_whole=True).each()
        t.linear(f"{layer}.linear", joint, hidden, role="gathered", note=NEEDS_GATHER)
    blocks = c.count("num_mem_blocks", default=1)
    with t.only(hybrid[:blocks]):
        _shared(t, c, f"{layer}.shared_transformer", hidden, bias)
    with t.only(hybrid[blocks:]), t.block("repeated"):
        _shared(t, c, f"{layer}.shared_transformer", hidden, bias)
    rank = c.count("adapter_rank", default=128)
    for number, user in enumerate(hybrid):
        with t.only([hybrid[number % blocks]]):
            _adapters(t, c, f"{layer}.shared_transformer", hidden, number, rank)
    return t
