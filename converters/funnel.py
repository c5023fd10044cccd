"""Funnel Transformer: blocks of layers between which the sequence is halved, and a decoder at the full length.

Attention has matrices and vectors for relative positions and segments, all cut by head.
Source: transformers ``models/funnel/modeling_funnel.py``; arXiv 2006.03236.
"""

from __future__ import annotations

from tpshard.axes import Dim, Units
from tpshard.blocks.dense import mlp, vocabulary_of
from tpshard.config import Config
from tpshard.table import AFTER_SUM, Table

FAMILY = "funnel"
MODEL_TYPES = ("funnel",)


def table(c: Config) -> Table:
    hidden, vocab = c.count("d_model", "hidden_size"), vocabulary_of(c)
    heads = Units("heads", c.count("n_head", "num_attention_heads"), noun="attention heads")
    size = c.count("d_head", default=64)
    ffn = Units("ffn", c.count("d_inner"), noun="feed-forward channels").each()
    c = c.with_usual(block_sizes=[4, 4, 4])
    blocks = c.listed("block_sizes", len(c.get("block_sizes")))

    t = Table(0, prefixes=("funnel.", ""))
    t.embedding("@embeddings.word_embeddings", vocab, hidden)
    t.norm("@embeddings.layer_norm", hidden, bias=True)
    for number, layers in enumerate(blocks):
        with t.stack(layers, prefixes=[f"{outer}encoder.blocks.{number}." for outer in ("funnel.", "")]):
            _layer(t, heads, size, ffn, hidden)
    decoder = [f"{outer}decoder.layers." for outer in ("funnel.", "")]
    with t.stack(c.count("num_decoder_layers", default=2), prefixes=decoder, optional=True):  # the base has none
        _layer(t, heads, size, ffn, hidden)
    with t.stack(optional=True):
        t.tensor("lm_head.bias", vocab, role="head_bias")
        t.tensor("lm_head.weight", vocab, hidden, role="head", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("lm_head.weight", "@embeddings.word_embeddings.weight")
    return t


def _layer(t: Table, heads: Units, size: int, ffn: Dim, hidden: int) -> None:
    at = "@{layer}.attention"
    each = heads.each(size)
    t.linear(f"{at}.q_head", each, hidden, role="q")
    t.linear(f"{at}.k_head", each, hidden, role="k", bias=True)
    t.linear(f"{at}.v_head", each, hidden, role="v", bias=True)
    t.linear(f"{at}.post_proj", hidden, each, role="o", bias=True)
    t.tensor(f"{at}.r_kernel", hidden, heads.each(), size, role="k")  # of positions
    for name in ("r_w_bias", "r_r_bias", "r_s_bias"):
        t.tensor(f"{at}.{name}", heads.each(), size, role="attn_head")
    t.tensor(f"{at}.seg_embed", 2, heads.each(), size, role="attn_head")
    for part in ("weight", "bias"):
        role = "norm" if part == "weight" else "norm_bias"
        t.tensor(f"{at}.layer_norm.{part}", hidden, role=role, note=AFTER_SUM)
    mlp(t, "@{layer}.ffn", ffn, hidden, names=("linear_1", "linear_2"))
    t.norm("@{layer}.ffn.layer_norm", hidden, bias=True)
