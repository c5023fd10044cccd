"""Mamba-2: state-space heads that share B and C by groups; Codestral Mamba is of this kind.

Source: transformers ``models/mamba2/modeling_mamba2.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.mixers import mamba2, state_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "mamba2"
MODEL_TYPES = ("mamba2",)


def table(c: Config) -> Table:
    hidden, vocab = c.count("hidden_size"), vocabulary_of(c)

    t = Table(c.count("num_hidden_layers"), prefixes=("backbone.", ""))
    t.embedding("@embeddings", vocab, hidden)
    layer = "@layers.{layer}"
    t.norm(f"{layer}.norm", hidden)
    mamba2(
        t, f"{layer}.mixer", state_heads(c.count("num_heads"), c.count("n_groups", default=8)), hidden,
        size=c.count("head_dim"), state=c.count("state_size"), kernel=c.count("conv_kernel"),
        bias=c.flag("use_bias", default=False), conv_bias=c.flag("use_conv_bias", default=True),
    )  # fmt: skip
    t.norm("@norm_f", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embeddings.weight" if tied else None)
    return t
