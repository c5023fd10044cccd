"""MPT: q, k, v as three blocks of one matrix, no biases, ALiBi, whose slopes the model computes.

Source: transformers ``models/mpt/modeling_mpt.py`` (``Wqkv(...).chunk(3)``).
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "mpt"
MODEL_TYPES = ("mpt",)


def table(c: Config) -> Table:
    hidden, count = c.count("d_model", "hidden_size"), c.count("n_heads", "num_attention_heads")
    heads, size = Heads("heads", count, count), c.with_usual(hidden_size=hidden).head_dim(count)
    width = 4 * hidden  # transformers' MptMLP takes 4 whatever expansion_ratio says
    ffn = Units("ffn", width, noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(c.count("n_layers", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding("@wte", vocab, hidden)
    layer = "@blocks.{layer}"
    t.linear(f"{layer}.attn.Wqkv", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv")
    t.linear(f"{layer}.attn.out_proj", hidden, heads.query(size), role="o")
    mlp(t, f"{layer}.ffn", ffn, hidden, bias=False, names=("up_proj", "down_proj"))
    norms(t, layer, ("norm_1", "norm_2"), hidden)
    t.norm("@norm_f", hidden)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, hidden, tied_to="@wte.weight" if tied else None)
    return t
