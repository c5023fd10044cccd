"""Mamba 1 and Falcon-Mamba, which norms time step, B and C without weights.

Source: transformers ``models/mamba/modeling_mamba.py``, ``models/falcon_mamba/modeling_falcon_mamba.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.mixers import mamba1, time_step_rank, widened
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "mamba"
MODEL_TYPES = ("falcon_mamba", "mamba")


def table(c: Config) -> Table:
    hidden, vocab = c.count("hidden_size"), vocabulary_of(c)
    channels = Units("ssm_channels", widened(c, "expand"), noun="state-space channels").each()

    t = Table(c.count("num_hidden_layers", "n_layer"), prefixes=("backbone.", ""))
    t.embedding("@embeddings", vocab, hidden)
    layer = "@layers.{layer}"
    t.norm(f"{layer}.norm", hidden)
    mamba1(
        t, f"{layer}.mixer", channels, hidden, state=c.count("state_size", default=16),
        rank=time_step_rank(c, "time_step_rank"), kernel=c.count("conv_kernel", default=4),
        bias=c.flag("use_bias", default=False), conv_bias=c.flag("use_conv_bias", default=True),
    )  # fmt: skip
    t.norm("@norm_f", hidden)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, hidden, tied_to="@embeddings.weight" if tied else None)
    return t
