"""Reformer: two streams of residuals, attention in chunks, local or by hashes that keys and queries share.

A layer of hashed attention has one ``query_key`` in place of query and key. The rotations behind the hashes are
drawn at run time for all heads; each rank keeps those of its own.
Source: transformers ``models/reformer/modeling_reformer.py``; arXiv 2001.04451.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "reformer"
MODEL_TYPES = ("reformer",)


def table(c: Config) -> Table:
    hidden, vocab = c.count("hidden_size"), vocabulary_of(c)
    heads = Units("heads", c.count("num_attention_heads"), noun="attention heads")
    each = heads.each(c.count("attention_head_size", default=64))
    ffn = Units("ffn", c.count("feed_forward_size"), noun="feed-forward channels").each()
    kinds = c.listed("attn_layers", len(c.get("attn_layers", default=[])))
    hashed = [number for number, kind in enumerate(kinds) if kind == "lsh"]

    t = Table(len(kinds), prefixes=("reformer.", ""))
    t.embedding("@embeddings.word_embeddings", vocab, hidden)
    if c.flag("axial_pos_embds", default=True):
        rows, columns = c.get("axial_pos_shape", default=[64, 64])
        first, second = c.get("axial_pos_embds_dim", default=[64, 192])
        t.whole("@embeddings.position_embeddings.weights.0", rows, 1, first, why="a factor of the positions")
        t.whole("@embeddings.position_embeddings.weights.1", 1, columns, second, why="a factor of the positions")
    else:
        t.embedding("@embeddings.position_embeddings.embedding", None, hidden, role="position")
    layer = "@encoder.layers.{layer}"
    at = f"{layer}.attention.self_attention"
    with t.only(hashed):
        t.linear(f"{at}.query_key", each, hidden, role="q")
    with t.only(set(range(len(kinds))) - set(hashed)):
        t.linear(f"{at}.query", each, hidden, role="q")
        t.linear(f"{at}.key", each, hidden, role="k")
    t.linear(f"{at}.value", each, hidden, role="v")
    for buffer in ("self_mask_value_float16", "self_mask_value_float32", "mask_value_float16", "mask_value_float32"):
        t.tensor(f"{at}.{buffer}", role="buffer", optional=True)  # files of 2020
    t.linear(f"{layer}.attention.output.dense", hidden, each, role="o")
    t.linear(f"{layer}.feed_forward.dense.dense", ffn, hidden, role="up", bias=True)
    t.linear(f"{layer}.feed_forward.output.dense", hidden, ffn, role="down", bias=True)
    t.norm(f"{layer}.attention.layer_norm", hidden, bias=True)
    t.norm(f"{layer}.feed_forward.layer_norm", hidden, bias=True)
    t.norm("@encoder.layer_norm", 2 * hidden, bias=True)
    with t.stack(optional=True):
        t.tensor("lm_head.decoder.weight", vocab, 2 * hidden, role="head")
        t.tensor("lm_head.decoder.bias", vocab, role="head_bias", optional=True)
        t.tensor("lm_head.bias", vocab, role="head_bias", optional=True)  # the same by its other name
    return t
