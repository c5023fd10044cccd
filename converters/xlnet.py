"""XLNet: attention matrices of three dimensions, ``[hidden, heads, head size]``, with keys of positions as well.

Source: transformers ``models/xlnet/modeling_xlnet.py``; arXiv 1906.08237.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import mlp, vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "xlnet"
MODEL_TYPES = ("xlnet",)


def table(c: Config) -> Table:
    hidden, count, vocab = c.count("d_model", "hidden_size"), c.count("n_head", "num_attention_heads"), vocabulary_of(c)
    heads = Units("heads", count, noun="attention heads").each()
    size = c.count("d_head", default=max(hidden // count, 1))
    ffn = Units("ffn", c.count("d_inner"), noun="feed-forward channels").each()

    t = Table(c.count("n_layer", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding("@word_embedding", vocab, hidden)
    t.whole("@mask_emb", 1, 1, hidden, why="one vector")
    at = "@layer.{layer}.rel_attn"
    for name, role in (("q", "q"), ("k", "k"), ("v", "v"), ("r", "k"), ("o", "o")):  # r: the keys of positions
        t.tensor(f"{at}.{name}", hidden, heads, size, role=role)
    for name in ("r_w_bias", "r_r_bias", "r_s_bias"):
        t.tensor(f"{at}.{name}", heads, size, role="attn_head")
    t.tensor(f"{at}.seg_embed", 2, heads, size, role="attn_head")
    t.norm(f"{at}.layer_norm", hidden, bias=True)
    mlp(t, "@layer.{layer}.ff", ffn, hidden, names=("layer_1", "layer_2"))
    t.norm("@layer.{layer}.ff.layer_norm", hidden, bias=True)
    with t.stack(optional=True):
        t.tensor("lm_loss.bias", vocab, role="head_bias")
        t.tensor("lm_loss.weight", vocab, hidden, role="head", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("lm_loss.weight", "@word_embedding.weight")
    return t
