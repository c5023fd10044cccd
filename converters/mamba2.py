"""Mamba-2: state-space heads that share B and C by groups, as query heads share keys and values.

``in_proj`` joins z, x, B, C and dt; the convolution runs over x, B and C; the gated norm spans all heads.
Source: transformers ``models/mamba2/modeling_mamba2.py`` (``Mamba2Mixer``).
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.partition import Heads, Padded
from tpshard.table import Table

FAMILY = "mamba2"
MODEL_TYPES = ("mamba2",)


def table(c: Config) -> Table:
    hidden = c.count("hidden_size")
    heads = Heads(
        "heads",
        c.count("num_heads"),
        c.count("n_groups", default=1),
        noun="state-space heads",
        group_noun="state-space groups",
    )
    x, state, one = heads.query(c.count("head_dim")), heads.kv(c.count("state_size")), heads.query(1)
    vocab = Padded("vocab", c.count("vocab_size")).each()
    bias = c.flag("use_bias", default=False)

    t = Table(layers=c.count("num_hidden_layers"), prefixes=("backbone.", ""))
    t.embedding("@embeddings", vocab, hidden)
    layer = "@layers.{layer}"
    t.norm(f"{layer}.norm", hidden)
    t.linear(f"{layer}.mixer.in_proj", x + x + state + state + one, hidden, role="ssm_in", bias=bias)
    t.tensor(f"{layer}.mixer.conv1d.weight", x + state + state, 1, c.count("conv_kernel"), role="ssm_conv")
    if c.flag("use_conv_bias", default=True):
        t.tensor(f"{layer}.mixer.conv1d.bias", x + state + state, role="ssm_conv_bias")
    for name in ("A_log", "D", "dt_bias"):
        t.tensor(f"{layer}.mixer.{name}", one, role="ssm_head")
    t.norm(f"{layer}.mixer.norm", x)
    t.linear(f"{layer}.mixer.out_proj", hidden, x, role="ssm_out", bias=bias)
    t.norm("@norm_f", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embeddings.weight" if tied else None)
    return t
