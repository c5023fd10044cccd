"""Moshi's language model: projections in a module of their own (``q_proj.linear``), gate and up as ``fc1``.

The embedding has one row more than the head: the word before the first.
Source: transformers ``models/moshi/modeling_moshi.py`` (``MoshiLinear``, ``MoshiGatingMLP``).
"""

from __future__ import annotations

from tpshard.axes import Padded, Units
from tpshard.blocks.dense import attention, fused_mlp, heads_of, norms, vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "moshi"
MODEL_TYPES = ("moshi",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads)
    ffn = Units("ffn", c.count("ffn_dim") // 2, noun="feed-forward channels").each()
    rows = Padded("embedding rows", c.count("vocab_size") + 1, noun="rows of words and the first").each()

    t = Table(c.count("num_hidden_layers"), prefixes=("model.", ("decoder.model.", "decoder."), ""))
    t.embedding("@embed_tokens", rows, hidden)
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        names=("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"),
    )  # fmt: skip
    fused_mlp(t, f"{layer}.mlp", ffn, hidden, names=("fc1", "fc2"))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    t.norm("@norm", hidden)
    t.head("lm_head", vocabulary_of(c), hidden, tied_to=None)
    return t
