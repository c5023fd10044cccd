"""HY-V4 and A.X-K2: latent attention with a gate on every head's output, an indexer, and DeepSeek's experts.

HY-V4 keeps several residual streams, mixed by small matrices before every block; sinks stand one a head. A.X-K2
stores the gate beside the queries, head by head, and has norms with a gate of a few channels.
Source: transformers ``models/{hy_v4,axk2}/modeling_*.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import (
    channels_of,
    decoder,
    expert_channels,
    gated_mlp,
    latent_attention,
    latent_keys,
    norms,
    query_latent,
    token_indexer,
)  # fmt: skip
from tpshard.blocks.experts import CORRECTION, mixed_layers, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "hy_v4"
MODEL_TYPES = ("axk2", "hy_v4", "hy_v4_vl_text")
STREAMS = "every rank has all residual streams"
GATED_NORM = "a gate of a few channels is not worth a sum over ranks"


def table(c: Config) -> Table:
    hidden, experts, bias = c.count("hidden_size"), c.count("n_routed_experts", "num_local_experts"), c.flag(
        "attention_bias", default=False
    )
    layers, is_hy = mixed_layers(c, first_dense=1), c.model_type != "axk2"
    t = decoder(c, experts=experts)
    layer = "@layers.{layer}"
    at = f"{layer}.self_attn"
    if is_hy:
        heads = latent_attention(c, t, at, bias=bias)
        t.linear(f"{at}.linear_gate", heads.each(c.count("v_head_dim")), hidden, role="attn_gate")
        t.tensor(f"{at}.learnable_sink_param", heads.each(), role="sinks")
        _streams(t, c, hidden)
        norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    else:
        heads = Units("heads", c.count("num_attention_heads"), noun="attention heads")
        size = c.count("qk_nope_head_dim") + c.count("qk_rope_head_dim") + c.count("v_head_dim")
        t.linear(f"{at}.q_b_proj", heads.each(size), 2 * query_latent(c, t, at, bias=bias), role="q_b")
        latent_keys(c, t, at, heads, bias=bias)
        _gated_norm(t, c, f"{layer}.input_layernorm", hidden)
    with t.only(_choosing(c)):
        token_indexer(c, t, f"{at}.indexer")
    names = ("linear_gate" if is_hy else "gate_proj", "up_proj", "down_proj")
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, names=names)
        if not is_hy:
            t.norm(f"{layer}.post_attention_layernorm", hidden)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", experts, expert_channels(c, "moe_intermediate_size"), hidden, correction=CORRECTION,
        )  # fmt: skip
        shared = shared_channels(c.number("n_shared_experts", default=1) * c.count("moe_intermediate_size"))
        if shared:
            gated_mlp(t, f"{layer}.mlp.shared_experts", shared, hidden, names=names, part="shared_")
        if not is_hy:
            _gated_norm(t, c, f"{layer}.post_attention_layernorm", hidden)
    return t


def _choosing(c: Config) -> list[int]:
    """The layers with an indexer: all of A.X-K2's; HY-V4's first, and then one in four, unless the config says."""
    count = c.count("num_hidden_layers")
    if c.model_type == "axk2":
        return list(range(count))
    if c.get("indexer_types") is None:
        return [at for at in range(count) if at == 0 or at % 4 == 1]
    return [at for at, kind in enumerate(c.listed("indexer_types", count)) if kind == "full"]


def _streams(t: Table, c: Config, hidden: int) -> None:
    """What mixes the residual streams: before attention, before the MLP, and at the end."""
    count = c.count("hc_mult", default=4)
    layer = "@layers.{layer}.hc_pre"
    parts = [("", f"{layer}.hc_attn_layer.hc", 2), ("", f"{layer}.hc_mlp_layer.hc", 2)]
    parts += [("last", "@hc_pre.hc_head.hc_head", 1), ("last, as HY-V4-VL has it", "@hc_head.hc_pre.hc_head", 1)]
    for block, name, ways in parts:
        with t.block(block):
            t.whole(f"{name}_fn", ways * count, count * hidden, why=STREAMS)
            t.whole(f"{name}_base", ways * count, why=STREAMS)
            t.whole(f"{name}_scale", ways, why=STREAMS)
    t.one_of("last", "last, as HY-V4-VL has it")


def _gated_norm(t: Table, c: Config, at: str, hidden: int) -> None:
    rank = c.count("gated_norm_rank", default=16)
    t.norm(f"{at}.norm", hidden)
    t.whole(f"{at}.W_down.weight", rank, hidden, why=GATED_NORM)
    t.whole(f"{at}.W_up.weight", hidden, rank, why=GATED_NORM)
