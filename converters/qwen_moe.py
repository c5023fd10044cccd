"""Qwen2-MoE and Qwen3-MoE, alone and in Qwen3-VL and Qwen3-Omni: dense and expert layers, experts apart or stacked.

Qwen3-VL's first files hold the stacked experts input x output.
Source: transformers ``models/{qwen2_moe,qwen3_moe,qwen3_vl_moe,qwen3_omni_moe}/modeling_*.py`` and
``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, expert_channels, gated_mlp, heads_of, norms
from tpshard.blocks.experts import layers_where, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "qwen_moe"
USUAL = {
    "qwen3_vl_moe_text": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
                          "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
                          "moe_intermediate_size": 1408, "num_experts": 60},
    "qwen3_omni_moe_text": {"vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944,
                            "num_hidden_layers": 28, "num_attention_heads": 28,
                            "num_key_value_heads": 4, "moe_intermediate_size": 768,
                            "num_experts": 128},
}  # fmt: skip
MODEL_TYPES = ("qwen2_moe", "qwen3_moe", *USUAL)


def table(c: Config) -> Table:
    second = c.model_type == "qwen2_moe"
    hidden, heads, depth = c.count("hidden_size"), heads_of(c), c.count("num_hidden_layers")
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)
    count, step = c.count("num_experts", "num_local_experts"), c.count("decoder_sparse_step", default=1)
    alone = c.layer_numbers("mlp_only_layers")
    layers = layers_where(c, [at not in alone and not (at + 1) % step for at in range(depth)])

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        bias=c.flag("qkv_bias", default=True) if second else bias, out_bias=bias,
    )  # fmt: skip
    if not second:
        norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    if layers.dense:
        with t.only(layers.dense):
            gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, "moe_intermediate_size"), hidden,
            shared=shared_channels(c.count("shared_expert_intermediate_size")) if second else None,
            shared_name="shared_expert", either_way=c.model_type == "qwen3_vl_moe_text",
        )  # fmt: skip
        if second:
            t.linear(f"{layer}.mlp.shared_expert_gate", 1, hidden, role="shared_router")
    return t
