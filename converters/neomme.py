"""NeoMME, an encoder of text and pages: embeddings of low rank, a table of values beside them, a gate after attention.

Every token adds a row of ``value_embeddings`` to its values in some layers: a table with columns for every KV head.
Source: transformers ``models/neomme/modeling_neomme.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import attention, channels_of, heads_of, mlp, vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "neomme"
MODEL_TYPES = ("neomme",)


def table(c: Config) -> Table:
    hidden, heads, vocab = c.count("hidden_size", default=1024), heads_of(c, default_kv=4), vocabulary_of(c)
    size, rank = c.head_dim(heads.query_heads, default=64), c.count("embedding_rank", default=256)
    bias = c.flag("attention_bias", default=False)

    t = Table(c.count("num_hidden_layers"), prefixes=("model.", ""))
    t.embedding("@embed_tokens.word_embeddings", vocab, rank)
    t.linear("@embed_tokens.embedding_projection", hidden, rank, role="embed_projection")
    t.tensor("@value_embeddings.weight", c.count("vocab_size"), heads.kv(size), role="attn_head")
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias,
        names=("q_proj", "k_proj", "v_proj", "output_projection.o_proj"),
    )  # fmt: skip
    t.linear(f"{layer}.self_attn.output_projection.gate_proj", heads.query(size), hidden, role="attn_gate")
    t.tensor(f"{layer}.self_attn.exclusive_self_attention.alpha", heads.query(1), role="attn_head")
    mlp_bias = c.flag("mlp_bias", default=False)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=mlp_bias, names=("up_proj", "down_proj"))
    t.whole(f"{layer}.lambdas", 2, why="the shares of the residual stream and of its beginning")
    pixels = 3 * c.count("patch_size", default=32) ** 2
    patch = Units("patch", 2 * hidden, noun="channels of the patches", or_whole=True).each()
    with t.stack(optional=True, prefixes=("model.", "")):
        t.norm("@patch_embeddings.norm", pixels, bias=True)
        t.linear("@patch_embeddings.up_proj", patch, pixels, role="up")
        t.linear("@patch_embeddings.down_proj", hidden, patch, role="down", bias=True)
    t.linear("unembedding_projection", hidden, rank, role="head_projection", optional=True)
    t.linear("lm_head", vocab, rank, role="head", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("unembedding_projection.weight", "@embed_tokens.embedding_projection.weight")
        t.tie("lm_head.weight", "@embed_tokens.word_embeddings.weight")
    t.linear("proj", c.count("embedding_dim", default=128), hidden, role="pooler", bias=None, optional=True)
    return t
