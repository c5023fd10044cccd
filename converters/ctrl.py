"""CTRL: square matrices with biases, norms before the blocks, a bias on the head, sinusoids as positions.

Source: transformers ``models/ctrl/modeling_ctrl.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import attention, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "ctrl"
MODEL_TYPES = ("ctrl",)


def table(c: Config) -> Table:
    hidden, count = c.count("n_embd", "hidden_size"), c.count("n_head", "num_attention_heads")
    heads, size = Heads("heads", count, count), c.head_dim(count)
    ffn = Units("ffn", c.count("dff"), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(c.count("n_layer", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding("@w", vocab, hidden)
    layer = "@h.{layer}"
    attention(
        t, f"{layer}.multi_head_attention", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
        names=("Wq", "Wk", "Wv", "dense"),
    )  # fmt: skip
    mlp(t, f"{layer}.ffn", ffn, hidden, names=("0", "2"))
    norms(t, layer, ("layernorm1", "layernorm2"), hidden, bias=True)
    t.norm("@layernorm", hidden, bias=True)
    with t.stack(optional=True):
        t.tensor("lm_head.bias", vocab, role="head_bias")
        t.tensor("lm_head.weight", vocab, hidden, role="head", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("lm_head.weight", "@w.weight")
    return t
