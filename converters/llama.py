"""Llama and the many that share its blocks: separate q, k, v, o and gate, up, down.

Source: transformers ``models/llama/modeling_llama.py`` and the modules of the other model types.
"""

from __future__ import annotations

from tpshard.blocks import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "llama"
MODEL_TYPES = (
    "cwm", "emu3_text_model", "ernie4_5", "granite", "helium", "internlm3", "iquestcoder", "llama", "ministral",
    "ministral3", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3",
)  # fmt: skip

TIED = ("ernie4_5", "smollm3")  # unless the config says otherwise
QKV_BIAS = ("qwen2", "seed_oss")  # the same; the output matrix has none
HEADS_OF_128 = ("ernie4_5", "internlm3", "iquestcoder", "ministral3", "seed_oss")  # the same


def table(c: Config) -> Table:
    hidden, heads, ffn = c.count("hidden_size"), heads_of(c), channels_of(c)
    size = c.head_dim(heads.query_heads, default=128 if c.model_type in HEADS_OF_128 else None)
    # Where the config demands a bias it must be there; where it says nothing, files converted from elsewhere have some.
    some_bias = c.flag("attention_bias", "qkv_bias", "use_bias", default=False) or None
    qkv_bias = c.flag("attention_bias", default=True) or None if c.model_type in QKV_BIAS else some_bias
    out_bias = c.flag("attention_out_bias", default=False) or None if c.model_type in QKV_BIAS else some_bias
    mlp_bias = c.flag("mlp_bias", "use_bias", "bias", default=False) or None

    t = decoder(c, tied=c.model_type in TIED)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=qkv_bias, out_bias=out_bias)
    if c.model_type == "qwen3":
        norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    t.tensor(f"{layer}.self_attn.rotary_emb.inv_freq", None, role="buffer", optional=True)  # files of 2023
    gated_mlp(t, f"{layer}.mlp", ffn, hidden, bias=mlp_bias)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
