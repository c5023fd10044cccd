"""Bamba and Falcon-H1: Mamba-2 and attention, in layers of one kind each (Bamba) or side by side in every layer.

Source: transformers ``models/bamba/modeling_bamba.py``, ``models/falcon_h1/modeling_falcon_h1.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.blocks.mixers import mamba2, state_heads, widened
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "bamba"
MODEL_TYPES = ("bamba", "falcon_h1")


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=8)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)
    both = c.model_type == "falcon_h1"
    state = state_heads(c.count("mamba_n_heads", default=128), c.count("mamba_n_groups", default=1))
    inner = widened(c, "mamba_expand")
    if both and c.values.get("mamba_d_ssm", 1024) is not None:  # null, unlike absent, means the widened hidden size
        inner = c.count("mamba_d_ssm", default=1024)

    t = decoder(c, norm="final_layernorm")
    layer = "@layers.{layer}"
    every = frozenset(range(t.layers))
    attentive = every if both else every & frozenset(c.get("attn_layer_indices", default=()))
    with t.only(attentive):
        attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    with t.only(every if both else every - attentive):
        mamba2(
            t, f"{layer}.mamba", state, hidden, size=inner // state.query_heads,
            state=c.count("mamba_d_state", default=256), kernel=c.count("mamba_d_conv", default=4),
            bias=c.flag("mamba_proj_bias", default=False),
            out_bias=c.flag("projectors_bias", default=False) if both else None,
            conv_bias=c.flag("mamba_conv_bias", default=True),
            norm=not both or c.flag("mamba_rms_norm", default=False),
        )  # fmt: skip
    gated_mlp(t, f"{layer}.feed_forward", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False))
    norms(t, layer, ("input_layernorm", "pre_ff_layernorm"), hidden)
    return t
