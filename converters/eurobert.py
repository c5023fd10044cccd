"""EuroBERT, UltraBERT and ESM C: Llama's layers as encoders, each with a head of its own.

EuroBERT's head is one matrix; UltraBERT's has two more before it; ESM C's is RoBERTa's, and its norms of
queries and keys span all heads.
Source: transformers ``models/{eurobert,ultrabert,esmc}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Dim, Units
from tpshard.blocks.dense import attention, channels_of, gated_mlp, heads_of, norms, vocabulary_of
from tpshard.blocks.encoders import masked_head, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "eurobert"
MODEL_TYPES = ("esmc", "eurobert", "ultrabert")


def table(c: Config) -> Table:
    hidden, heads, vocab = c.count("hidden_size"), heads_of(c), vocabulary_of(c)
    size = c.head_dim(heads.query_heads)
    bias, esmc = c.flag("attention_bias", default=False), c.model_type == "esmc"

    t = Table(c.count("num_hidden_layers"), prefixes=("model.", f"{c.model_type}.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    if esmc:
        t.norm(f"{layer}.self_attn.q_norm", heads.query(size))
        t.norm(f"{layer}.self_attn.k_norm", heads.kv(size))
    mlp_bias = c.flag("mlp_bias", default=False)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=mlp_bias)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=esmc)
    t.norm("@norm", hidden)
    tied = "@embed_tokens.weight" if c.flag("tie_word_embeddings", default=False) else None
    if esmc:
        masked_head(t, hidden, hidden, vocab, at="lm_head", dense="dense", norm="layer_norm", tied_to=tied)
    elif c.model_type == "ultrabert":
        _wide_head(t, c, hidden, vocab, tied)
    else:
        with t.stack(optional=True):
            t.linear("lm_head", vocab, hidden, role="head", bias=mlp_bias)
    task_heads(t, hidden)
    return t


def _wide_head(t: Table, c: Config, hidden: int, vocab: Dim, tied: str | None) -> None:
    size = c.count("prediction_head_size", default=768)
    width = Units("prediction", size, noun="channels of the head", or_whole=True)
    with t.stack(optional=True, prefixes=(("cls", ""), ("head.decoder", ""))):
        t.linear("head.linear1", width.each(), hidden, role="up")
        t.linear("head.linear2", hidden, width.each(), role="down")
        t.tensor("@.weight", vocab, hidden, role="head", optional=tied is not None)
    if tied is not None:
        t.tie("cls.weight", tied)
