"""Kimi-Linear: delta attention in three layers of four, latent attention in the others, experts after the first layers.

Which layers are of which kind is in ``linear_attn_config``, counted from 1, or in ``layer_types``. Dense layers are
``mlp`` in the released files and ``block_sparse_moe`` in those that transformers saves.
Source: transformers ``models/kimi_linear/modeling_kimi_linear.py``; names on disk: ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import (
    MIXTRAL,
    channels_of,
    decoder,
    expert_channels,
    experts,
    gated_mlp,
    latent_attention,
    norms,
)
from tpshard.blocks.mixers import ATTENTION, RECURRENT, kimi_delta_attention, layers_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "kimi_linear"
MODEL_TYPES = ("kimi_linear",)


def table(c: Config) -> Table:
    hidden, linear = c.count("hidden_size"), c.nested("linear_attn_config") if c.get("linear_attn_config") else c
    count = c.count("num_experts", "num_local_experts", default=256)
    heads = Units("linear_heads", linear.count("num_heads", "linear_num_heads", default=32), noun="delta heads")
    size = linear.count("linear_head_dim", default=128) if linear is c else linear.count("head_dim", default=128)
    width = c.count("moe_intermediate_size")

    t = decoder(c, experts=count)
    layer, at = "@layers.{layer}", "@layers.{layer}.self_attn"
    types = c.with_usual(layer_types=_usual(linear, t.layers)).listed("layer_types", t.layers)
    with t.only(layers_of(types, *RECURRENT)):
        kimi_delta_attention(
            t, at, heads, size, hidden, a_log=(1, 1, heads.each(), 1), low_rank=True,
            kernel=linear.count("short_conv_kernel_size", "linear_conv_kernel_dim", default=4),
        )  # fmt: skip
    with t.only(layers_of(types, *ATTENTION)):
        latent_attention(c, t, at)
    kinds = c.get("mlp_layer_types")
    first = c.number("first_k_dense_replace", default=1)
    dense = layers_of(kinds, "dense") if kinds else frozenset(range(min(first, t.layers)))
    with t.only(dense):
        for block, name in (("dense", "mlp"), ("dense, saved by transformers", "block_sparse_moe")):
            with t.block(block):
                gated_mlp(t, f"{layer}.{name}", channels_of(c), hidden)
        t.one_of("dense", "dense, saved by transformers")
    with t.only(set(range(t.layers)) - dense):
        moe = f"{layer}.block_sparse_moe"
        t.linear(f"{moe}.gate", count, hidden, role="router")
        t.tensor(f"{moe}.gate.e_score_correction_bias", count, role="router_bias")
        shared = Units("shared_ffn", c.count("num_shared_experts", "n_shared_experts", default=1) * width,
                       noun="channels of the shared experts").each()  # fmt: skip
        gated_mlp(t, f"{moe}.shared_experts", shared, hidden, part="shared_")
        experts(t, f"{moe}.experts", count, expert_channels(c, "moe_intermediate_size"), hidden, names=MIXTRAL)
        t.one_of("experts", "stacked experts")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t


def _usual(linear: Config, layers: int) -> list[str]:
    listed = linear.get("full_attn_layers")
    attentive = [n - 1 for n in listed] if listed is not None else range(4, layers, 4)
    return ["full_attention" if number in attentive else "linear_attention" for number in range(layers)]
