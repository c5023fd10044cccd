"""GPT-NeoX and Pythia: q, k, v of one head lie together, head after head.

The Japanese variant has no biases but one, after the last layer's attention, which is no part of a matrix.
Source: transformers ``models/gpt_neox/modeling_gpt_neox.py`` (``view(..., heads, 3 * head_size)``) and
``models/gpt_neox_japanese/``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "gpt_neox"
MODEL_TYPES = ("gpt_neox", "gpt_neox_japanese")


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", query_heads, query_heads), c.head_dim(query_heads)
    japanese = c.model_type == "gpt_neox_japanese"
    width = hidden * c.count("intermediate_multiple_size", default=4) if japanese else c.count("intermediate_size")
    ffn = Units("ffn", width, noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    bias = not japanese and c.flag("attention_bias", default=True)
    layers = c.count("num_hidden_layers")

    t = Table(layers, prefixes=("gpt_neox_japanese." if japanese else "gpt_neox.", ""))
    t.embedding("@embed_in", vocab, hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.attention.query_key_value", heads.grouped(size, size, size), hidden, role="qkv", bias=bias)
    t.linear(f"{layer}.attention.dense", hidden, heads.query(size), role="o", bias=bias)
    if japanese:
        with t.only([layers - 1]):
            t.whole(f"{layer}.attention.dense_bias", hidden, why="added to the residual stream after the sum")
    mlp(t, f"{layer}.mlp", ffn, hidden, bias=not japanese, names=("dense_h_to_4h", "dense_4h_to_h"))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
    # Causal mask and rotary frequencies, which releases before 2023 saved.
    t.tensor(f"{layer}.attention.bias", 1, 1, None, None, role="buffer", optional=True)
    t.tensor(f"{layer}.attention.masked_bias", role="buffer", optional=True)
    t.tensor(f"{layer}.attention.rotary_emb.inv_freq", None, role="buffer", optional=True)
    t.norm("@final_layer_norm", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=japanese)
    t.head("embed_out", vocab, hidden, tied_to="@embed_in.weight" if tied else None)
    return t
