"""LFM2 and LFM3: gated short convolutions with attention in some layers, dense or (LFM2-MoE) with experts.

Source: transformers ``models/lfm2``, ``models/lfm2_moe``, ``models/lfm3``; names on disk: ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Dim, Units
from tpshard.blocks.dense import MIXTRAL, attention, decoder, expert_channels, experts, gated_mlp, heads_of, norms
from tpshard.blocks.mixers import ATTENTION, layers_of, short_convolution
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "lfm2"
MODEL_TYPES = ("lfm2", "lfm2_moe", "lfm3")


def table(c: Config) -> Table:
    hidden, heads, third = c.count("hidden_size"), heads_of(c), c.model_type == "lfm3"
    size = c.head_dim(heads.query_heads, default=128 if third else None)
    count = c.count("num_experts", "num_local_experts", default=32) if c.model_type == "lfm2_moe" else 0

    t = decoder(c, experts=count, norm="embedding_norm", tied=c.flag("tie_embedding", default=True))
    layer = "@layers.{layer}"
    every = frozenset(range(t.layers))
    attentive = layers_of(_types(c, t.layers), *ATTENTION)
    with t.only(every - attentive):
        bias = c.flag("conv_bias", default=False)
        short_convolution(t, f"{layer}.conv", hidden, c.count("conv_L_cache", default=7 if third else 3), bias=bias)
    with t.only(attentive):
        at, q = f"{layer}.self_attn", heads.query(size)
        if third:
            bias = c.flag("attention_bias", default=False)
            attention(t, at, q, heads.kv(size), hidden, bias=bias, out_bias=bias)
            norms(t, at, ("q_norm", "k_norm"), size)
            if c.flag("use_attention_gate", default=True):
                t.linear(f"{at}.gate_proj", heads.query(1), hidden, role="attn_gate")
        else:
            attention(t, at, q, heads.kv(size), hidden, names=("q_proj", "k_proj", "v_proj", "out_proj"))
            norms(t, at, ("q_layernorm", "k_layernorm"), size)
    sparse = frozenset(range(c.number("num_dense_layers", default=2), t.layers)) if count else frozenset()
    with t.only(every - sparse):
        gated_mlp(t, f"{layer}.feed_forward", _channels(c), hidden, names=MIXTRAL)
    with t.only(sparse):
        if sparse:
            _experts(t, c, f"{layer}.feed_forward", hidden, count)
    norms(t, layer, ("operator_norm", "ffn_norm"), hidden)
    if third and c.flag("use_sandwich_norm", default=True):
        norms(t, layer, ("post_operator_norm", "post_ffn_norm"), hidden)
    return t


def _experts(t: Table, c: Config, at: str, hidden: int, count: int) -> None:
    t.linear(f"{at}.gate", count, hidden, role="router")
    if c.flag("use_expert_bias", default=True):
        t.tensor(f"{at}.expert_bias", count, role="router_bias")
    experts(t, f"{at}.experts", count, expert_channels(c, "moe_intermediate_size"), hidden, names=MIXTRAL)
    t.one_of("experts", "stacked experts")


def _types(c: Config, layers: int) -> list[object]:
    """The layers' kinds: listed, or those of attention listed, or LFM3's pattern."""
    if c.get("layer_types") is not None or c.model_type == "lfm2_moe":
        return c.listed("layer_types", layers)
    if c.model_type == "lfm3":
        return ["full_attention" if n % 4 == 2 or (n % 4 == 0 and n) else "conv" for n in range(layers)]
    attentive = c.get("full_attn_idxs", default=range(layers))
    return ["full_attention" if n in attentive else "conv" for n in range(layers)]


def _channels(c: Config) -> Dim:
    """The feed-forward channels: of LFM2 two thirds of what the config says, rounded up, unless it says otherwise."""
    width = c.count("block_ff_dim", "intermediate_size")
    if c.model_type == "lfm2" and c.flag("block_auto_adjust_ff_dim", default=True):
        multiple = c.count("block_multiple_of", default=256)
        width = int(c.get("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return Units("ffn", width, noun="feed-forward channels").each()
