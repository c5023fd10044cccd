"""Llama and the many that share its blocks: separate q, k, v, o and gate, up, down.

Source: transformers ``models/llama/modeling_llama.py`` and the modules of the other model types.
"""

from __future__ import annotations

from tpshard.blocks import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "llama"
MODEL_TYPES = ("cwm", "granite", "helium", "llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3")


def table(c: Config) -> Table:
    hidden, heads, ffn = c.count("hidden_size"), heads_of(c), channels_of(c)
    size = c.head_dim(heads.query_heads)
    # Where the config demands a bias it must be there; where it says nothing, files converted from elsewhere have some.
    attention_bias = c.flag("attention_bias", default=False) or None
    mlp_bias = c.flag("mlp_bias", default=False) or None

    t = decoder(c, tied=c.model_type == "smollm3")
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        bias=c.model_type == "qwen2" or attention_bias, out_bias=attention_bias,
    )  # fmt: skip
    if c.model_type == "qwen3":
        norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    t.tensor(f"{layer}.self_attn.rotary_emb.inv_freq", None, role="buffer", optional=True)  # files of 2023
    gated_mlp(t, f"{layer}.mlp", ffn, hidden, bias=mlp_bias)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
