"""GPT-NeoX and Pythia: q, k, v of one head lie together, head after head.

Source: transformers ``models/gpt_neox/modeling_gpt_neox.py`` (``view(..., heads, 3 * head_size)``).
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.partition import Heads, Padded, Units
from tpshard.table import Table

FAMILY = "gpt_neox"
MODEL_TYPES = ("gpt_neox",)


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", query_heads, query_heads), c.head_dim(query_heads)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    bias = c.flag("attention_bias", default=True)

    t = Table(layers=c.count("num_hidden_layers"), prefixes=("gpt_neox.", ""))
    t.embedding("@embed_in", vocab, hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.attention.query_key_value", heads.grouped(size, size, size), hidden, role="qkv", bias=bias)
    t.linear(f"{layer}.attention.dense", hidden, heads.query(size), role="o", bias=bias)
    t.linear(f"{layer}.mlp.dense_h_to_4h", ffn, hidden, role="up", bias=True)
    t.linear(f"{layer}.mlp.dense_4h_to_h", hidden, ffn, role="down", bias=True)
    t.norm(f"{layer}.input_layernorm", hidden, bias=True)
    t.norm(f"{layer}.post_attention_layernorm", hidden, bias=True)
    # Causal mask and rotary frequencies, which releases before 2023 saved.
    t.tensor(f"{layer}.attention.bias", 1, 1, None, None, role="buffer", optional=True)
    t.tensor(f"{layer}.attention.masked_bias", role="buffer", optional=True)
    t.tensor(f"{layer}.attention.rotary_emb.inv_freq", None, role="buffer", optional=True)
    t.norm("@final_layer_norm", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("embed_out", vocab, hidden, tied_to="@embed_in.weight" if tied else None)
    return t
