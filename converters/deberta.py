"""DeBERTa, versions 1, 2 and 3: BERT's layers with attention to relative positions as well.

Version 1 has q, k and v of one head together, and biases of q and v by themselves; later ones have three matrices.
The vectors of relative positions are shared by all layers and whole; what makes keys and queries of
them is cut by head.
Released files hold the heads of pre-training under names of their own (``lm_predictions``, ``mask_predictions``).
Source: transformers ``models/{deberta,deberta_v2}/modeling_*.py``; arXiv 2006.03654.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, heads_of, mlp, vocabulary_of
from tpshard.blocks.encoders import Encoder, encoder_of, layer_norms, masked_head, pooler, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "deberta"
MODEL_TYPES = ("deberta", "deberta-v2")


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    width = c.count("embedding_size", default=e.hidden)

    t = Table(c.count("num_hidden_layers"), prefixes=("deberta.", ""))
    _embeddings(t, c, e, width)
    layer = "@encoder.layer.{layer}"
    at = f"{layer}.attention.self"
    if c.model_type == "deberta":
        size = c.head_dim(heads_of(c).query_heads)
        t.linear(f"{at}.in_proj", heads_of(c).grouped(size, size, size), e.hidden, role="qkv")
        t.tensor(f"{at}.q_bias", e.q, role="q_bias")
        t.tensor(f"{at}.v_bias", e.kv, role="v_bias")
        t.linear(f"{layer}.attention.output.dense", e.hidden, e.q, role="o", bias=True)
    else:
        names = ("self.query_proj", "self.key_proj", "self.value_proj", "output.dense")
        attention(t, f"{layer}.attention", e.q, e.kv, e.hidden, bias=True, out_bias=True, names=names)
    if c.flag("relative_attention", default=False):
        _relative(t, c, e, at)
    mlp(t, layer, e.ffn, e.hidden, names=("intermediate.dense", "output.dense"))
    layer_norms(t, [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"], e.hidden)
    _heads(t, c, e, width)
    return t


def _embeddings(t: Table, c: Config, e: Encoder, width: int) -> None:
    t.embedding("@embeddings.word_embeddings", e.vocab, width)
    t.tensor("@embeddings.position_ids", 1, None, role="buffer", optional=True)  # files before 2023
    if c.flag("position_biased_input", default=True):
        t.embedding("@embeddings.position_embeddings", c.count("max_position_embeddings"), width, role="position")
    if c.number("type_vocab_size", default=0):
        t.embedding("@embeddings.token_type_embeddings", c.count("type_vocab_size"), width, role="position")
    if width != e.hidden:
        t.linear("@embeddings.embed_proj", e.hidden, width, role="embed_projection")
    layer_norms(t, ["@embeddings.LayerNorm"], e.hidden)


def _relative(t: Table, c: Config, e: Encoder, at: str) -> None:
    kinds = c.get("pos_att_type", default=[])
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    first = c.model_type == "deberta"
    if not c.flag("share_att_key", default=False):  # else the content's own projections serve positions too
        if "c2p" in kinds:
            t.linear(f"{at}.{'pos_proj' if first else 'pos_key_proj'}", e.kv, e.hidden, role="k", bias=not first)
        if "p2c" in kinds:
            t.linear(f"{at}.{'pos_q_proj' if first else 'pos_query_proj'}", e.q, e.hidden, role="q", bias=True)
    given = c.get("max_relative_positions", default=-1)
    reach = given if given > 0 else c.count("max_position_embeddings")
    buckets = -1 if first else c.get("position_buckets", default=-1)
    distances = 2 * (buckets if buckets > 0 else reach)
    t.whole("@encoder.rel_embeddings.weight", distances, e.hidden, why="a vector for each distance, for all layers")
    if not first and "layer_norm" in str(c.get("norm_rel_ebd", default="none")).lower():
        layer_norms(t, ["@encoder.LayerNorm"], e.hidden)
    if not first and c.number("conv_kernel_size"):
        size, groups = c.count("conv_kernel_size"), c.count("conv_groups", default=1)
        why = "one convolution along the sequence, beside the first layer"
        t.whole("@encoder.conv.conv.weight", e.hidden, e.hidden // groups, size, why=why)
        t.whole("@encoder.conv.conv.bias", e.hidden, why=why)
        layer_norms(t, ["@encoder.conv.LayerNorm"], e.hidden)


def _heads(t: Table, c: Config, e: Encoder, width: int) -> None:
    words = "@embeddings.word_embeddings.weight" if c.flag("tie_word_embeddings", default=True) else None
    masked_head(t, e.hidden, width, e.vocab, tied_to=words)
    released = "lm_predictions.lm_head"
    masked_head(t, e.hidden, e.hidden, e.vocab, at=released, dense="dense", norm="LayerNorm", tied_to=words)
    with t.stack(optional=True):  # of version 3: which words the generator has put in
        t.linear("mask_predictions.dense", e.hidden, e.hidden, role="pooler", bias=True)
        layer_norms(t, ["mask_predictions.LayerNorm"], e.hidden)
        t.linear("mask_predictions.classifier", 1, e.hidden, role="pooler", bias=True)
    pooler(t, e.hidden, at="pooler.dense")
    task_heads(t, e.hidden)
