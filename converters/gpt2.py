"""GPT-2 and GPT-1: matrices stored input x output (``Conv1D``), q, k, v as three blocks of columns.

GPT-1 has its norms after the blocks and none at the end.
Source: transformers ``models/{gpt2,openai}/modeling_*.py`` and ``pytorch_utils.Conv1D``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "gpt2"
MODEL_TYPES = ("gpt2", "openai-gpt")


def table(c: Config) -> Table:
    first = c.model_type == "openai-gpt"
    hidden, query_heads = c.count("n_embd", "hidden_size"), c.count("n_head", "num_attention_heads")
    heads, size = Heads("heads", query_heads, query_heads), c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("ffn", c.count("n_inner", default=4 * hidden), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    words, positions = ("tokens_embed", "positions_embed") if first else ("wte", "wpe")

    t = Table(layers=c.count("n_layer", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding(f"@{words}", vocab, hidden)
    t.embedding(f"@{positions}", c.count("n_positions", "max_position_embeddings"), hidden, role="position")
    layer = "@h.{layer}"
    t.conv1d(f"{layer}.attn.c_attn", hidden, q + kv + kv, role="qkv")
    t.conv1d(f"{layer}.attn.c_proj", q, hidden, role="o")
    t.conv1d(f"{layer}.mlp.c_fc", hidden, ffn, role="up")
    t.conv1d(f"{layer}.mlp.c_proj", ffn, hidden, role="down")
    norms(t, layer, ("ln_1", "ln_2"), hidden, bias=True)
    if c.flag("add_cross_attention", default=False):  # as the decoder of a model with an encoder
        t.conv1d(f"{layer}.crossattention.q_attn", hidden, q, role="q")
        t.conv1d(f"{layer}.crossattention.c_attn", hidden, kv + kv, role="kv")
        t.conv1d(f"{layer}.crossattention.c_proj", q, hidden, role="o")
        t.norm(f"{layer}.ln_cross_attn", hidden, bias=True)
    # The causal mask, which releases before 2023 saved.
    for attention in ("attn", "crossattention"):
        t.tensor(f"{layer}.{attention}.bias", 1, 1, None, None, role="buffer", optional=True)
        t.tensor(f"{layer}.{attention}.masked_bias", role="buffer", optional=True)
    t.tensor("@position_ids", None, role="buffer", optional=True)
    if not first:
        t.norm("@ln_f", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, hidden, tied_to=f"@{words}.weight" if tied else None)
    return t
