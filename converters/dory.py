"""Dory: vectors of unit length throughout (nGPT), an output gate, norms without weights before ``o`` and ``down``.

Published files count attention and MLP as layers of their own, in turns; those that transformers saves hold both
in one.
The norms span what is cut: the sum of squares is taken over ranks.
Source: transformers ``models/dory/{modeling,configuration}_dory.py``, ``core_model_loading.LayerPairCollapse``.
"""

from __future__ import annotations

from tpshard.blocks.dense import channels_of, heads_of, vocabulary_of
from tpshard.config import Config
from tpshard.table import NORMED_BY, Table

FAMILY = "dory"
MODEL_TYPES = ("dory",)
PREFIXES = ("backbone.", "model.", "")
RATE = "the rate at which a channel of the residual stream follows"


def table(c: Config) -> Table:
    hidden, vocab, blocks = c.count("hidden_size"), vocabulary_of(c), c.count("num_hidden_layers")
    if "mlp" in c.get("layer_types", default=("mlp",)):
        blocks //= 2  # the config, too, counts attention and MLP apart

    t = Table(0, prefixes=PREFIXES)
    t.embedding("@embeddings", vocab, hidden)
    t.linear("lm_head", vocab, hidden, role="head")
    t.tensor("lm_head.logit_scale", vocab, role="head_bias")
    with t.stack(blocks, prefixes=PREFIXES, optional=True) as saved:
        _attention(t, c, "@layers.{layer}.self_attn", hidden)
        _mlp(t, c, "@layers.{layer}.mlp", hidden)
        t.whole("@layers.{layer}.lambda_1", hidden, why=RATE)
        t.whole("@layers.{layer}.lambda_2", hidden, why=RATE)
    with t.stack(2 * blocks, prefixes=PREFIXES, optional=True) as published:
        with t.only(range(0, 2 * blocks, 2)):
            _attention(t, c, "@layers.{layer}.mixer", hidden)
            t.whole("@layers.{layer}.attn_alpha", hidden, why=RATE)
        with t.only(range(1, 2 * blocks, 2)):
            _mlp(t, c, "@layers.{layer}.mixer", hidden)
            t.whole("@layers.{layer}.mlp_alpha", hidden, why=RATE)
    t.one_stack_of(saved, published)
    return t


def _attention(t: Table, c: Config, at: str, hidden: int) -> None:
    heads, bias = heads_of(c), c.flag("attention_bias", default=False)
    size = c.head_dim(heads.query_heads, default=256)
    each = heads.query(size)
    t.linear(f"{at}.q_proj", each, hidden, role="q", bias=bias)
    t.linear(f"{at}.k_proj", heads.kv(size), hidden, role="k", bias=bias)
    t.linear(f"{at}.v_proj", heads.kv(size), hidden, role="v", bias=bias)
    t.linear(f"{at}.g_proj", each, hidden, role="attn_gate")
    for name in ("sqk", "s_gate"):
        t.tensor(f"{at}.{name}", each, role="attn_head")
    t.linear(f"{at}.o_proj", hidden, each, role="o", bias=bias, note=f"{NORMED_BY}attn_sub_norm")


def _mlp(t: Table, c: Config, at: str, hidden: int) -> None:
    ffn, bias = channels_of(c), c.flag("mlp_bias", default=False)
    for name in ("gate", "up"):
        t.linear(f"{at}.{name}_proj", ffn, hidden, role=name, bias=bias)
        t.tensor(f"{at}.suv_{name}", ffn, role="ffn_channel")
    t.linear(f"{at}.down_proj", hidden, ffn, role="down", bias=bias, note=f"{NORMED_BY}ffn_sub_norm")
