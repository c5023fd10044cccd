"""Granite 4: Mamba-2 or attention, then experts (none in the dense ones) beside an MLP that all tokens take.

Source: transformers ``models/granitemoehybrid/modeling_granitemoehybrid.py``; names on disk: ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import attention, channels_of, decoder, fused_mlp, heads_of, norms
from tpshard.blocks.mixers import ATTENTION, RECURRENT, layers_of, mamba2, state_heads, widened
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "granitemoehybrid"
MODEL_TYPES = ("granitemoehybrid",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)
    count = c.number("num_local_experts", "num_experts", default=8)
    state = state_heads(c.count("mamba_n_heads", default=128), c.count("mamba_n_groups", default=1))
    shared = Units("shared_ffn", c.count("shared_intermediate_size", default=1024), noun="shared channels").each()

    t = decoder(c)
    layer = "@layers.{layer}"
    types = c.with_usual(layer_types=["mamba"] * t.layers).listed("layer_types", t.layers)
    with t.only(layers_of(types, *ATTENTION)):
        attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    with t.only(layers_of(types, *RECURRENT)):
        mamba2(
            t, f"{layer}.mamba", state, hidden, size=widened(c, "mamba_expand") // state.query_heads,
            state=c.count("mamba_d_state", default=256), kernel=c.count("mamba_d_conv", default=4),
            bias=c.flag("mamba_proj_bias", default=False), conv_bias=c.flag("mamba_conv_bias", default=True),
        )  # fmt: skip
    fused_mlp(t, f"{layer}.shared_mlp", shared, hidden, names=("input_linear", "output_linear"), part="shared_")
    if count:
        ffn = channels_of(c)
        at = f"{layer}.block_sparse_moe"
        for block, up, down, router in (
            ("experts", "input_linear.weight", "output_linear.weight", "router.layer"),
            ("stacked experts", "experts.gate_up_proj", "experts.down_proj", "router"),
        ):
            with t.block(block):
                t.tensor(f"{at}.{up}", count, ffn * 2, hidden, role="expert_gate_up")
                t.tensor(f"{at}.{down}", count, hidden, ffn, role="expert_down")
                t.linear(f"{at}.{router}", count, hidden, role="router")
        t.one_of("experts", "stacked experts")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
