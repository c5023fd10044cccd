"""ConvBERT: half of the heads' width is attention, the other half convolutions whose kernels the tokens make.

A kernel of one head is made from all heads' products of queries and convolved keys: a sum over ranks inside the
attention. The output matrix takes the attention of all heads first, then the convolutions of all.
Source: transformers ``models/convbert/modeling_convbert.py``; arXiv 2008.02496.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import mlp, vocabulary_of
from tpshard.blocks.encoders import embeddings, layer_norms, task_heads
from tpshard.config import Config
from tpshard.table import ADDED_ONCE, Table

FAMILY = "convbert"
MODEL_TYPES = ("convbert",)


def table(c: Config) -> Table:
    hidden, vocab = c.count("hidden_size"), vocabulary_of(c)
    width = c.count("embedding_size", default=768)
    layer = "@encoder.layer.{layer}"

    t = Table(c.count("num_hidden_layers"), prefixes=("convbert.", ""))
    embeddings(t, c, vocab, width)
    if width != hidden:
        t.linear("@embeddings_project", hidden, width, role="embed_projection", bias=True)
    _attention(t, c, hidden, layer)
    _feed_forward(t, c, hidden, layer)
    layer_norms(t, [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"], hidden)
    with t.stack(optional=True):
        t.linear("generator_predictions.dense", width, hidden, role="head_projection", bias=True)
        layer_norms(t, ["generator_predictions.LayerNorm"], width)
        t.tensor("generator_lm_head.bias", vocab, role="head_bias")
        t.tensor("generator_lm_head.weight", vocab, width, role="head", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("generator_lm_head.weight", "@embeddings.word_embeddings.weight")
    task_heads(t, hidden)
    return t


def _attention(t: Table, c: Config, hidden: int, layer: str) -> None:
    count = max(c.count("num_attention_heads") // c.count("head_ratio", default=2), 1)
    heads, kernel = Units("heads", count, noun="attention heads"), c.count("conv_kernel_size", default=9)
    each = heads.each(hidden // count // 2)
    at = f"{layer}.attention.self"
    for name, role in (("query", "q"), ("key", "k"), ("value", "v"), ("conv_out_layer", "v")):
        t.linear(f"{at}.{name}", each, hidden, role=role, bias=True)
    why = "a filter for every channel of the residual stream"
    t.whole(f"{at}.key_conv_attn_layer.depthwise.weight", hidden, 1, kernel, why=why)
    t.tensor(f"{at}.key_conv_attn_layer.pointwise.weight", each, hidden, 1, role="k")
    t.tensor(f"{at}.key_conv_attn_layer.bias", each, 1, role="k_bias")
    t.linear(f"{at}.conv_kernel_layer", count * kernel, each, role="attn_mix", bias=True)
    t.linear(f"{layer}.attention.output.dense", hidden, each * 2, role="o", bias=True)


def _feed_forward(t: Table, c: Config, hidden: int, layer: str) -> None:
    groups = c.count("num_groups", default=1)
    ffn = Units("ffn", c.count("intermediate_size") // groups, noun="feed-forward channels of every group")
    if groups == 1:
        mlp(t, layer, ffn.each(), hidden, names=("intermediate.dense", "output.dense"))
        return
    t.tensor(f"{layer}.intermediate.dense.weight", groups, hidden // groups, ffn.each(), role="up")
    t.tensor(f"{layer}.intermediate.dense.bias", ffn.each() * groups, role="up_bias")
    t.tensor(f"{layer}.output.dense.weight", groups, ffn.each(), hidden // groups, role="down")
    t.tensor(f"{layer}.output.dense.bias", hidden, role="down_bias", note=ADDED_ONCE)
