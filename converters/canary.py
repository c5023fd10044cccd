"""Canary: Parakeet's encoder and a decoder with a norm behind the embedding; its head is tied to that and has a bias.

Source: transformers ``models/canary/modeling_canary.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded, Units
from tpshard.blocks.dense import attention, heads_of, mlp
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "canary"
MODEL_TYPES = ("canary",)
PREFIXES = ("model.", "")


def table(c: Config) -> Table:
    decoder = c.nested("decoder_config")
    hidden, heads = decoder.count("hidden_size"), heads_of(decoder)
    size, bias = decoder.head_dim(heads.query_heads), decoder.flag("attention_bias", default=True)
    vocab = Padded("vocab", decoder.count("vocab_size")).each()
    ffn = Units("ffn", decoder.count("intermediate_size"), noun="feed-forward channels").each()
    encoder = part_of(c, "encoder_config", model_type="parakeet_encoder")

    t = Table(decoder.count("num_hidden_layers"), prefixes=PREFIXES)
    t.include(table_of(encoder), *((f"{outer}encoder.", f"{outer}encoder.") for outer in PREFIXES), axes="encoder_")
    t.embedding("@decoder.embed_tokens", vocab, hidden)
    t.norm("@decoder.embedding_layernorm", hidden, bias=True)
    t.tensor("@decoder.pos_emb.weight", None, hidden, role="position", optional=True)
    width = encoder.count("hidden_size")
    if width != hidden:
        t.whole_module("@decoder.proj", why="from the encoder's width to the decoder's")
    layer = "@decoder.layers.{layer}"
    for at in ("self_attn", "encoder_attn"):
        attention(t, f"{layer}.{at}", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    mlp(t, f"{layer}.mlp", ffn, hidden)
    for norm in ("input_layernorm", "post_attention_layernorm", "final_layernorm"):
        t.norm(f"{layer}.{norm}", hidden, bias=True)
    t.norm("@decoder.norm", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("proj_out", vocab, hidden, tied_to="@decoder.embed_tokens.weight" if tied else None)
    with t.stack(optional=True):
        t.tensor("proj_out.bias", vocab, role="head_bias")
    return t
