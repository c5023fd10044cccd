"""Zamba 2: Mamba-2 throughout, and before some layers one of a few shared transformer blocks.

A shared block stands in the files in the first layer that uses it; the others repeat it, and low-rank adapters
make the difference, one for every layer that uses the block, all of them beside the block. Attention reads the
hidden state and the embedding side by side.
Source: transformers ``models/zamba2/modeling_zamba2.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import decoder, fused_mlp, norms
from tpshard.blocks.mixers import RECURRENT, layers_of, mamba2, state_heads, widened
from tpshard.config import Config
from tpshard.table import NEEDS_GATHER, Table

FAMILY = "zamba2"
MODEL_TYPES = ("zamba2",)
PATTERN = "m" + ("mmmmmh" * 7) + "mmmmhmmmhmm"  # of the config class: mamba, hybrid


def table(c: Config) -> Table:
    hidden = c.count("hidden_size")
    state = state_heads(c.count("n_mamba_heads", default=8), c.count("mamba_ngroups", default=1))
    bias = c.flag("add_bias_linear", default=False)

    t = decoder(c, norm="final_layernorm", tied=True)
    layer = "@layers.{layer}"
    usual = ["hybrid" if letter == "h" else "mamba" for letter in PATTERN]
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
    for number in range(len(hybrid)):
        with t.only([hybrid[number % blocks]]):
            _adapters(t, c, f"{layer}.shared_transformer", hidden, number, rank)
    return t


def _shared(t: Table, c: Config, at: str, hidden: int, bias: bool) -> None:
    """The transformer block that several layers share."""
    heads, size = _heads(c, hidden)
    t.norm(f"{at}.input_layernorm", 2 * hidden)
    for name, rows in (("q", heads.query(size)), ("k", heads.kv(size)), ("v", heads.kv(size))):
        t.linear(f"{at}.self_attn.{name}_proj", rows, 2 * hidden, role=name)
    t.linear(f"{at}.self_attn.o_proj", hidden, heads.query(size), role="o")
    norms(t, at, ("pre_ff_layernorm",), hidden)
    fused_mlp(t, f"{at}.feed_forward", _channels(c, hidden).each(), hidden, bias=bias)


def _adapters(t: Table, c: Config, at: str, hidden: int, number: int, rank: int) -> None:
    """The adapters of the ``number``-th layer that uses a shared block: down to a latent, and up along the cut."""
    heads, size = _heads(c, hidden)
    why = "all that the adapter makes is made of its latent"
    mlp = f"{at}.feed_forward.gate_up_proj_adapter_list.{number}"
    t.whole(f"{mlp}.0.weight", rank, hidden, why=why)
    t.linear(f"{mlp}.1", _channels(c, hidden).each() * 2, rank, role="gate_up")
    if c.flag("use_shared_attention_adapter", default=False):
        for name, rows in (("q", heads.query(size)), ("k", heads.kv(size)), ("v", heads.kv(size))):
            adapter = f"{at}.self_attn.linear_{name}_adapter_list.{number}"
            t.whole(f"{adapter}.0.weight", rank, 2 * hidden, why=why)
            t.linear(f"{adapter}.1", rows, rank, role=name)


def _heads(c: Config, hidden: int) -> tuple[Heads, int]:
    query = c.count("num_attention_heads", default=32)
    return Heads("heads", query, c.count("num_key_value_heads", default=query)), 2 * hidden // query


def _channels(c: Config, hidden: int) -> Units:
    return Units("ffn", c.count("intermediate_size", default=4 * hidden), noun="feed-forward channels")
