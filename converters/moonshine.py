"""Moonshine: rotary attention without biases in encoder and decoder, a gated feed-forward in the decoder alone.

Moonshine Streaming has an encoder of another width, whose norms are called ``gamma``, and stored positions between.
Source: transformers ``models/moonshine/modeling_moonshine.py``, ``models/moonshine_streaming``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import attention, mlp
from tpshard.blocks.encdec import lacks
from tpshard.blocks.speech import WAVE
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "moonshine"
MODEL_TYPES = ("moonshine", "moonshine_streaming")
PREFIXES = ("model.", "")


def table(c: Config) -> Table:
    streaming, hidden = c.model_type == "moonshine_streaming", c.count("hidden_size")
    encoder = c.nested("encoder_config") if streaming else c
    tied = c.flag("tie_word_embeddings", default=not streaming)
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(0, prefixes=PREFIXES)
    t.shared("@decoder.embed_tokens.weight", heads=("proj_out.weight",) if tied else (), vocab=vocab, width=hidden)
    if not tied:
        with t.stack(optional=True):
            t.linear("proj_out", vocab, hidden, role="head")
    with t.stack(_count(encoder, "encoder", "num_hidden_layers", 6), prefixes=PREFIXES, optional=lacks(c, "encoder")):
        _encoder(t, encoder, streaming)
    with t.stack(_count(c, "decoder", "num_hidden_layers", 6), prefixes=PREFIXES, optional=lacks(c, "decoder")):
        _decoder(t, c, hidden)
        if streaming:
            width = encoder.count("hidden_size")
            t.embedding("@decoder.pos_emb", c.count("max_position_embeddings"), width, role="position")
            if width != hidden:
                t.whole("@decoder.proj.weight", hidden, width, why="from the encoder's width to the decoder's")
    return t


def _encoder(t: Table, c: Config, streaming: bool) -> None:
    width = c.count("hidden_size")
    layer, at = "@encoder.layers.{layer}", "@encoder.layers.{layer}.self_attn"
    heads = _heads(c, "encoder")
    size = c.head_dim(heads.query_heads)
    bias = c.flag("attention_bias", default=False)
    attention(t, at, heads.query(size), heads.kv(size), width, bias=bias)
    ffn = Units("encoder_ffn", c.count("intermediate_size"), noun="encoder feed-forward channels").each()
    mlp(t, f"{layer}.mlp", ffn, width)
    if streaming:
        t.whole_module("@encoder.embedder", why=WAVE)
        for norm in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "@encoder.final_norm"):
            t.tensor(f"{norm}.gamma", width, role="norm")
        return
    for name in ("conv1", "conv2", "conv3", "groupnorm"):
        t.whole_module(f"@encoder.{name}", why=WAVE)
    for norm in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "@encoder.layer_norm"):
        t.norm(norm, width)


def _decoder(t: Table, c: Config, hidden: int) -> None:
    heads, layer = _heads(c, "decoder"), "@decoder.layers.{layer}"
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)
    for at in ("self_attn", "encoder_attn"):
        attention(t, f"{layer}.{at}", heads.query(size), heads.kv(size), hidden, bias=bias)
    ffn = Units("decoder_ffn", c.count("intermediate_size"), noun="decoder feed-forward channels").each()
    t.linear(f"{layer}.mlp.fc1", ffn * 2, hidden, role="gate_up", bias=True)
    t.linear(f"{layer}.mlp.fc2", hidden, ffn, role="down", bias=True)
    for norm in ("input_layernorm", "post_attention_layernorm", "final_layernorm"):
        t.norm(f"{layer}.{norm}", hidden)
    t.norm("@decoder.norm", hidden)


def _count(c: Config, side: str, key: str, default: int) -> int:
    return c.count(f"{side}_{key}", key, default=default)


def _heads(c: Config, side: str) -> Heads:
    query = _count(c, side, "num_attention_heads", 8)
    return Heads(f"{side}_heads", query, _count(c, side, "num_key_value_heads", query))
