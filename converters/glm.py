"""GLM-4 (``glm``) and GLM-4-0414 (``glm4``): biased q, k, v and ``[gate; up]`` in one matrix; glm4 has two more norms.

Source: transformers ``models/glm/modeling_glm.py``, ``models/glm4/modeling_glm4.py``.
"""

from __future__ import annotations

from tpshard.blocks import attention, channels_of, decoder, fused_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "glm"
MODEL_TYPES = ("glm", "glm4")


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=2)
    size = c.head_dim(heads.query_heads, default=128)

    t = decoder(c)
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        bias=c.flag("attention_bias", default=True),
    )  # fmt: skip
    fused_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    if c.model_type == "glm4":
        norms(t, layer, ("post_self_attn_layernorm", "post_mlp_layernorm"), hidden)
    return t
