"""Llama and the many that share its blocks: separate q, k, v, o and gate, up, down.

Source: transformers ``models/llama/modeling_llama.py`` and the modules of the other model types.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "llama"
_LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
          "num_attention_heads": 32}  # fmt: skip
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8}
_QWEN2 = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN3 = {**_QWEN2, "head_dim": 128}
_QWEN2_VL = {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
             "num_attention_heads": 64, "num_key_value_heads": 8}  # fmt: skip
USUAL = {
    "emu3_text_model": {**_MISTRAL, "vocab_size": 184622},
    "granite": _LLAMA,
    "granite4_vision_text": _LLAMA,
    "granite_docling_text": {"vocab_size": 133800, "hidden_size": 1024, "intermediate_size": 2048,
                             "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4},
    "llama": _LLAMA,
    "ministral3": {**_MISTRAL, "vocab_size": 131072, "num_hidden_layers": 34},
    "mistral": _MISTRAL,
    "paddleocr_vl_text": {"vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072,
                          "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2},
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
                          "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
}  # fmt: skip
MODEL_TYPES = (
    *USUAL, "cwm", "ernie4_5", "helium", "internlm3", "iquestcoder", "ministral", "seed_oss", "smollm3"
)  # fmt: skip

# Unless the config says otherwise:
TIED = ("ernie4_5", "granite_docling_text", "paddleocr_vl_text", "smollm3")
QKV_BIAS = ("qwen2", "qwen2_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "seed_oss")  # the output matrix has none
HEADS_OF_128 = ("ernie4_5", "internlm3", "iquestcoder", "ministral3", "paddleocr_vl_text", "seed_oss")


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
    if c.model_type in ("qwen3", "qwen3_vl_text"):
        norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    t.tensor(f"{layer}.self_attn.rotary_emb.inv_freq", None, role="buffer", optional=True)  # files of 2023
    gated_mlp(t, f"{layer}.mlp", ffn, hidden, bias=mlp_bias)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
