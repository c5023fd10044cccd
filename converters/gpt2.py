"""GPT-2: matrices stored input x output (``Conv1D``), q, k, v as three blocks of columns.

Source: transformers ``models/gpt2/modeling_gpt2.py`` and ``pytorch_utils.Conv1D``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.partition import Heads, Padded, Units
from tpshard.table import Table

FAMILY = "gpt2"
MODEL_TYPES = ("gpt2",)


def table(c: Config) -> Table:
    hidden, query_heads = c.count("n_embd", "hidden_size"), c.count("n_head", "num_attention_heads")
    heads, size = Heads("heads", query_heads, query_heads), c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("ffn", c.count("n_inner", default=4 * hidden), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(layers=c.count("n_layer", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding("@wte", vocab, hidden)
    t.embedding("@wpe", c.count("n_positions", "max_position_embeddings"), hidden, role="position")
    layer = "@h.{layer}"
    t.conv1d(f"{layer}.attn.c_attn", hidden, q + kv + kv, role="qkv")
    t.conv1d(f"{layer}.attn.c_proj", q, hidden, role="o")
    t.conv1d(f"{layer}.mlp.c_fc", hidden, ffn, role="up")
    t.conv1d(f"{layer}.mlp.c_proj", ffn, hidden, role="down")
    t.norm(f"{layer}.ln_1", hidden, bias=True)
    t.norm(f"{layer}.ln_2", hidden, bias=True)
    # The causal mask, which releases before 2023 saved.
    t.tensor(f"{layer}.attn.bias", 1, 1, None, None, role="buffer", optional=True)
    t.tensor(f"{layer}.attn.masked_bias", role="buffer", optional=True)
    t.norm("@ln_f", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, hidden, tied_to="@wte.weight" if tied else None)
    return t
