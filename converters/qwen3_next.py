"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, and in every fourth layer attention with gated heads.

Qwen3-Next stores a delta net's matrices fused key head by key head, Qwen3.5 block by block. Prediction layers lie
apart, under ``mtp.``: attention layers that share embedding and head.
Source: transformers ``models/qwen3_next``, ``models/qwen3_5``, ``models/qwen3_5_moe``; prediction layers: vLLM
``model_executor/models/qwen3_next_mtp.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from tpshard.axes import Units
from tpshard.blocks.dense import channels_of, decoder, expert_channels, experts, gated_mlp, norms
from tpshard.blocks.mixers import (
    ATTENTION,
    RECURRENT,
    delta_heads,
    delta_net,
    every_nth,
    layers_of,
    query_gated_attention,
)
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "qwen3_next"
MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
         "linear_num_value_heads": 32}  # fmt: skip
USUAL = {
    "qwen3_5_text": {"vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
                     "num_attention_heads": 16, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {"vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
                         "num_key_value_heads": 2, "moe_intermediate_size": 512, "num_experts": 256},
}  # fmt: skip


def table(c: Config) -> Table:
    c = c.with_usual(**DELTA)
    hidden = c.count("hidden_size")
    count = 0 if c.model_type == "qwen3_5_text" else c.count("num_experts", "num_local_experts")

    t = decoder(c, experts=count, prefixes=("model.", "model.language_model.", ""))
    layer = "@layers.{layer}"
    usual = every_nth(t.layers, c.count("full_attention_interval", default=4), "full_attention", "linear_attention")
    types = c.with_usual(layer_types=usual).listed("layer_types", t.layers)
    with t.only(layers_of(types, *RECURRENT)):
        _delta_net(t, c, f"{layer}.linear_attn", hidden)
    with t.only(layers_of(types, *ATTENTION)):
        query_gated_attention(c, t, f"{layer}.self_attn")
    _feed_forward(t, c, f"{layer}.mlp", hidden, count, range(t.layers))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    prediction = c.count("mtp_num_hidden_layers", default=1)
    with t.stack(prediction, experts=count, prefixes=("mtp.",), optional=True):
        query_gated_attention(c, t, f"{layer}.self_attn")
        _feed_forward(t, c, f"{layer}.mlp", hidden, count, range(prediction))
        norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
        t.linear("@fc", hidden, 2 * hidden, role="prediction_projection")
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            t.norm(f"@{name}", hidden)
    return t


def _delta_net(t: Table, c: Config, at: str, hidden: int) -> None:
    d = delta_heads(c)
    key = c.count("linear_key_head_dim")
    fused = {
        "in_proj_qkvz": d.grouped(("kv", key), ("kv", key), ("query", d.size), ("query", d.size)),
        "in_proj_ba": d.grouped(("query", 1), ("query", 1)),
    }
    apart = {"in_proj_qkv": d.qkv, "in_proj_z": d.value, "in_proj_b": d.one, "in_proj_a": d.one}
    delta_net(
        t, at, d, hidden, ins=fused if c.model_type == "qwen3_next" else apart, convolutions={"conv1d": d.qkv},
        kernel=c.count("linear_conv_kernel_dim", default=4),
    )  # fmt: skip


def _feed_forward(t: Table, c: Config, at: str, hidden: int, count: int, layers: Iterable[int]) -> None:
    step, dense = c.count("decoder_sparse_step", default=1), c.layer_numbers("mlp_only_layers")
    sparse = [n for n in layers if count and n not in dense and (n + 1) % step == 0]
    if len(sparse) < len(list(layers)):
        with t.only(set(layers) - set(sparse)):
            gated_mlp(t, at, channels_of(c), hidden)
    if not sparse:
        return
    width = c.count("shared_expert_intermediate_size", default=512)
    with t.only(sparse):
        t.linear(f"{at}.gate", count, hidden, role="router")
        shared = Units("shared_ffn", width, noun="channels of the shared expert").each()
        gated_mlp(t, f"{at}.shared_expert", shared, hidden, part="shared_")
        t.linear(f"{at}.shared_expert_gate", 1, hidden, role="shared_router")
        experts(t, f"{at}.experts", count, expert_channels(c, "moe_intermediate_size"), hidden)
        t.one_of("experts", "stacked experts")
