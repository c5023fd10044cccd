"""Hunyuan's mixtures: A13B (v1) and Hy3. The MLP that every token takes is ``shared_mlp``.

Hy3's hub files hold a layer past the last that predicts a further token.
Source: transformers ``models/hunyuan_v1_moe/modeling_hunyuan_v1_moe.py``, ``models/hy_v3/modeling_hy_v3.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import (
    attention,
    channels_of,
    decoder,
    expert_channels,
    gated_mlp,
    heads_of,
    norms,
    vocabulary_of,
)  # fmt: skip
from tpshard.blocks.experts import Layers, mixed_layers, mixture, prediction, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "hunyuan_moe"
MODEL_TYPES = ("hunyuan_v1_moe", "hy_v3")


def table(c: Config) -> Table:
    third = c.model_type == "hy_v3"
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=8 if third else None)
    size, bias = c.head_dim(heads.query_heads, default=128 if third else None), c.flag("attention_bias", default=False)
    count, extra = c.count("num_experts"), c.number("num_nextn_predict_layers")
    width = "moe_intermediate_size" if third else "intermediate_size"
    every = frozenset(range(c.count("num_hidden_layers")))
    layers = mixed_layers(c, first_dense=1, predicted=extra) if third else Layers(frozenset(), every)

    t = decoder(c, experts=count, extra_layers=extra)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm") if third else ("query_layernorm", "key_layernorm"), size)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    mlp_bias = third and c.flag("mlp_bias", default=False)
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=mlp_bias)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, width), hidden,
            router="router.gate" if third else "gate.wg", correction="expert_bias" if third else None,
            shared=shared_channels(c.number("num_shared_experts", default=1) * c.count(width)),
            shared_name="shared_mlp", bias=mlp_bias,
        )  # fmt: skip
    if extra:
        prediction(t, layer, vocabulary_of(c), hidden)
    return t
