"""Gemma 1, 2 and 3: Llama's projections with up to four norms a layer, and from the third on norms of q and k.

Source: transformers ``models/gemma{,2,3}/modeling_gemma*.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "gemma"
_GEMMA2 = {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
           "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
USUAL = {
    "gemma": {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
              "num_attention_heads": 16, "num_key_value_heads": 16},
    "gemma2": _GEMMA2,
    "gemma3_text": {**_GEMMA2, "vocab_size": 262208},
}  # fmt: skip
MODEL_TYPES = tuple(USUAL)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads, default=256), c.flag("attention_bias", default=False)

    t = decoder(c, tied=True)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    if c.model_type != "gemma":
        norms(t, layer, ("pre_feedforward_layernorm", "post_feedforward_layernorm"), hidden)
    if c.model_type == "gemma3_text":
        norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    return t
