"""Command R and its successors: one norm before attention and MLP, which run side by side, and a tied head.

Command R+ normalises q and k of every head with weights of its own: these norms are cut by heads.
Source: transformers ``models/cohere{,2,_compass}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "cohere"
MODEL_TYPES = ("cohere", "cohere2", "cohere_compass_text")
_COHERE = {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
           "num_attention_heads": 64}  # fmt: skip
USUAL = {"cohere": _COHERE, "cohere2": _COHERE, "cohere_compass_text": _COHERE}


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)

    t = decoder(c, tied=True)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    if c.flag("use_qk_norm", default=False):
        t.tensor(f"{layer}.self_attn.q_norm.weight", heads.query(1), size, role="attn_head")
        t.tensor(f"{layer}.self_attn.k_norm.weight", heads.kv(1), size, role="attn_head")
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    t.norm(f"{layer}.input_layernorm", hidden)
    return t
