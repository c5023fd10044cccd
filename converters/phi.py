"""Phi-1, 1.5 and 2: attention and MLP side by side behind one norm, biases everywhere, in the head too.

Source: transformers ``models/phi/modeling_phi.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, heads_of, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "phi"
MODEL_TYPES = ("phi",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads)

    t = decoder(c, norm="final_layernorm", norm_bias=True, head_bias=True)
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        bias=True, out_bias=True, names=("q_proj", "k_proj", "v_proj", "dense"),
    )  # fmt: skip
    if c.flag("qk_layernorm", default=False):
        norms(t, f"{layer}.self_attn", ("q_layernorm", "k_layernorm"), hidden // heads.query_heads, bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    t.norm(f"{layer}.input_layernorm", hidden, bias=True)
    return t
