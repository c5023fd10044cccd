"""SqueezeBERT: BERT's layers with convolutions of width one in groups; a group of outputs sees a group of inputs alone.

Queries, keys and values are cut by head, whatever their groups: every rank has all inputs. The feed-forward is cut
inside every group, so that a rank's outputs of the first are its inputs of the second.
Source: transformers ``models/squeezebert/modeling_squeezebert.py``; arXiv 2006.11316.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_of, layer_norms, masked_head, pooler, task_heads
from tpshard.config import Config
from tpshard.table import ADDED_ONCE, Table

FAMILY = "squeezebert"
MODEL_TYPES = ("squeezebert",)


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    layer = "@encoder.layers.{layer}"

    t = Table(c.count("num_hidden_layers"), prefixes=("transformer.", "squeezebert.", ""))
    embeddings(t, c, vocab, c.count("embedding_size", default=768))
    for name, role, dim in (("query", "q", e.q), ("key", "k", e.kv), ("value", "v", e.kv)):
        inputs = e.hidden // c.count(f"{role}_groups", default=4)
        t.tensor(f"{layer}.attention.{name}.weight", dim, inputs, 1, role=role)
        t.tensor(f"{layer}.attention.{name}.bias", dim, role=f"{role}_bias")
    inner, last = c.count("intermediate_groups", default=4), c.count("output_groups", default=4)
    ffn = Units("ffn", c.count("intermediate_size") // last, noun="feed-forward channels of every group").each()
    if c.count("post_attention_groups", default=1) == 1:
        t.tensor(f"{layer}.post_attention.conv1d.weight", e.hidden, e.q, 1, role="o")
    t.tensor(f"{layer}.post_attention.conv1d.bias", e.hidden, role="o_bias", note=ADDED_ONCE)
    t.tensor(f"{layer}.intermediate.conv1d.weight", ffn * last, e.hidden // inner, 1, role="up")
    t.tensor(f"{layer}.intermediate.conv1d.bias", ffn * last, role="up_bias")
    t.tensor(f"{layer}.output.conv1d.weight", e.hidden, ffn, 1, role="down")
    t.tensor(f"{layer}.output.conv1d.bias", e.hidden, role="down_bias", note=ADDED_ONCE)
    layer_norms(t, [f"{layer}.post_attention.layernorm", f"{layer}.output.layernorm"], e.hidden)
    pooler(t, e.hidden)
    tied = c.flag("tie_word_embeddings", default=True)
    masked_head(t, e.hidden, e.hidden, vocab, tied_to="@embeddings.word_embeddings.weight" if tied else None)
    task_heads(t, e.hidden)
    return t
