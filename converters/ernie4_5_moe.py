"""ERNIE 4.5 with experts: experts in a range of layers, shared ones beside them, the router's correction of two rows.

Source: transformers ``models/ernie4_5_moe/modeling_ernie4_5_moe.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, expert_channels, gated_mlp, heads_of, norms
from tpshard.blocks.experts import DRAFTS, layers_where, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "ernie4_5_moe"
MODEL_TYPES = ("ernie4_5_moe",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=4)
    size, bias = c.head_dim(heads.query_heads), c.flag("use_bias", default=False)
    count, width = c.count("moe_num_experts", "num_experts"), c.count("moe_intermediate_size")
    depth, first = c.count("num_hidden_layers"), c.number("moe_layer_start_index", default=1)
    last, every = c.get("moe_layer_end_index", default=27), c.count("moe_layer_interval", default=1)
    last = depth - 1 if last == -1 else c.number("moe_layer_end_index", default=27)
    layers = layers_where(c, [first <= at <= last and not (at + 1) % every for at in range(depth)])

    t = decoder(c, experts=count, tied=True, head_bias=bias)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=bias)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, "moe_intermediate_size"), hidden, bias=bias,
            shared=shared_channels(c.number("moe_num_shared_experts", default=2) * width),
        )  # fmt: skip
        t.tensor(f"{layer}.mlp.moe_statics.e_score_correction_bias", 1, count, role="router_bias")
    for module in ("mtp_block", "mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj"):
        t.whole_module(f"@{module}", why=DRAFTS, optional=True)
    return t
