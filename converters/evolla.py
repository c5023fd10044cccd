"""Evolla: Llama, an encoder of proteins of ESM's kind, a resampler, and layers that attend to what that makes.

Source: transformers ``models/evolla/modeling_evolla.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms, vocabulary_of
from tpshard.blocks.encoders import encoder_layer, encoder_of, layer_norms
from tpshard.blocks.speech import norm_inside
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "evolla"
MODEL_TYPES = ("evolla",)
PROTEIN = {"vocab_size": 446, "hidden_size": 1280, "num_hidden_layers": 33, "num_attention_heads": 20,
           "intermediate_size": 5120}  # fmt: skip
PREFIXES = ("model.", "")


def table(c: Config) -> Table:
    hidden, heads, bias = c.count("hidden_size"), heads_of(c), c.flag("attention_bias", default=False)
    size, layer = c.head_dim(heads.query_heads), "@layers.{layer}"
    protein = c.with_usual(protein_encoder_config={}).nested("protein_encoder_config", **PROTEIN)

    t = decoder(c)
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    every = max(t.layers // c.count("aligner_num_add_layers", default=8), 1)
    with t.only(range(every - 1, t.layers, every)):
        _adapter(t, c, f"{layer}.adapter", hidden)
    below = [f"{at}protein_encoder." for at in PREFIXES]
    t.include(_encoder(protein), *(f"{at}model." for at in below), axes="protein_", or_whole=True)
    resampler = _resampler(c, protein.count("hidden_size"), hidden)
    t.include(resampler, *(f"{at}sequence_compressor_resampler." for at in below), axes="resampler_", or_whole=True)
    return t


def _adapter(t: Table, c: Config, at: str, hidden: int) -> None:
    """Attention from the text to the protein, and a feed-forward, each behind a gate."""
    count = c.count("num_attention_heads")
    heads, size = Heads("aligner_heads", count, count), c.count("hidden_size") // count
    t.whole(f"{at}.attention_norm.weight", hidden, why="a norm of what goes into the module")
    t.linear(f"{at}.query", heads.query(size), hidden, role="q", bias=True)
    t.linear(f"{at}.key_protein", heads.kv(size), hidden, role="k", bias=True)
    t.linear(f"{at}.value_protein", heads.kv(size), hidden, role="v", bias=True)
    t.linear(f"{at}.out_proj", hidden, heads.query(size), role="o", bias=c.flag("aligner_enable_bias", default=True))
    _feed_forward(t, f"{at}.ff", hidden, c.count("aligner_ffn_mult", default=4), "aligner_ffn")
    for gate in ("gate_attention", "gate_ffw"):
        t.whole(f"{at}.{gate}", 1, why="one number for all channels")


def _feed_forward(t: Table, at: str, hidden: int, ratio: int, axis: str) -> None:
    norm_inside(t, f"{at}.norm", hidden)
    ffn = Units(axis, ratio * hidden, noun="feed-forward channels").each()
    t.linear(f"{at}.fc1", ffn, hidden, role="up")
    t.linear(f"{at}.fc2", hidden, ffn, role="down")


def _encoder(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    t = Table(c.count("num_hidden_layers"))
    t.embedding("@embeddings.word_embeddings", vocab, e.hidden)
    encoder_layer(t, e, norms=("attention.LayerNorm", "LayerNorm"))
    layer_norms(t, ["@encoder.emb_layer_norm_after"], e.hidden)
    t.tensor("@rotary_embeddings.inv_freq", None, role="buffer", optional=True)
    return t


def _resampler(c: Config, width: int, hidden: int) -> Table:
    """A few latents that attend to the protein's residues, then one matrix to the language model's width."""
    count, size = c.count("resampler_heads", default=8), c.count("resampler_dim_head", default=64)
    heads, layer = Heads("heads", count, count), "@layers.{layer}"
    t = Table(c.count("resampler_depth", default=6))
    t.whole("@latents", c.count("resampler_num_latents", default=64), width, why="what the resampler starts from")
    for norm in ("norm_media", "norm_latents"):
        norm_inside(t, f"{layer}.0.{norm}", width)
    t.linear(f"{layer}.0.to_q", heads.query(size), width, role="q")
    t.linear(f"{layer}.0.to_kv", heads.kv(size) * 2, width, role="kv")
    t.linear(f"{layer}.0.to_out", width, heads.query(size), role="o")
    _feed_forward(t, f"{layer}.1", width, c.count("resampler_ff_mult", default=4), "ffn")
    t.norm("@norm", hidden, bias=True)
    for part, dims in (("weight", (hidden, width)), ("bias", (hidden,))):
        t.whole(f"@protein_projector.{part}", *dims, why="a norm of all its outputs follows")
    return t
