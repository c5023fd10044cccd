"""GLM-4 (``glm``), GLM-4-0414 (``glm4``) and GLM-4V: biased q, k, v and ``[gate; up]`` in one matrix.

The latter two also normalise what attention and MLP give.
Source: transformers ``models/{glm,glm4,glm4v}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, fused_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "glm"
MODEL_TYPES = ("glm", "glm4", "glm4v_text", "glm_ocr_text")
USUAL = {
    "glm4v_text": {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
                   "num_attention_heads": 32, "num_key_value_heads": 2},
    "glm_ocr_text": {"vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
                     "num_attention_heads": 16, "num_key_value_heads": 8},
}  # fmt: skip


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=2)
    size = c.head_dim(heads.query_heads, default=None if c.model_type in USUAL else 128)

    t = decoder(c)
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        bias=c.flag("attention_bias", default=c.model_type != "glm_ocr_text"),
    )  # fmt: skip
    fused_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    if c.model_type != "glm":
        norms(t, layer, ("post_self_attn_layernorm", "post_mlp_layernorm"), hidden)
    return t
