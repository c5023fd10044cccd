"""Byte Latent Transformer: a small model that finds patches, an encoder and a decoder of bytes, and a model of patches.

Encoder and decoder have attention between bytes and patches. Hashed groups of bytes have one table of embeddings.
Source: transformers ``models/blt/{modeling,configuration}_blt.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import attention, gated_mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "blt"
MODEL_TYPES = ("blt",)
ONCE_A_PATCH = "one small matrix: a cut would need a gather of all that it makes"


def table(c: Config) -> Table:
    usual = {"hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 260}
    encoder = c.nested("encoder_config", **usual, num_hidden_layers=1)
    decoder = c.nested("decoder_config", **usual, num_hidden_layers=9, intermediate_size=2816)
    model = c.nested("global_config", hidden_size=2048, num_attention_heads=16, num_hidden_layers=25,
                     intermediate_size=5632)  # fmt: skip
    width, hidden, out = encoder.count("hidden_size"), model.count("hidden_size"), decoder.count("hidden_size")
    patch = c.count("cross_attn_k", default=2)
    vocab = Padded("vocab", encoder.count("vocab_size"), noun="bytes").each()

    t = Table(0, prefixes=("model.", ""))
    tied = c.flag("tie_word_embeddings", default=False)
    t.linear("lm_head", vocab, out, role="head")
    t.tensor("@local_encoder.embed_tokens.weight", vocab, width, role="embed", optional=tied)
    if tied:
        t.tie("@local_encoder.embed_tokens.weight", "lm_head.weight")
    hashes = Padded("hashes", _hashes(c), noun="hashed groups of bytes").each()
    t.embedding("@encoder_hash_tok_embedding", hashes, width)
    with _layers(t, encoder, "local_encoder", "encoder_"):
        t.whole("@patch_embedding_projection.weight", patch * width, width, why=ONCE_A_PATCH)
    _cross_attention(t, encoder, "local_encoder", "encoder_", every=False)
    with _layers(t, model, "global_transformer", ""):
        if patch * width != hidden:
            t.whole("@token_embedding_projection.weight", hidden, patch * width, why=ONCE_A_PATCH)
    with _layers(t, decoder, "local_decoder", "decoder_"):
        t.whole("@patch_embedding_projection.weight", patch * out, hidden, why=ONCE_A_PATCH)
        t.norm("@norm", out)
    _cross_attention(t, decoder, "local_decoder", "decoder_", every=True)
    if c.flag("patch_in_forward", default=True):
        _patcher(t, c)
    return t


def _patcher(t: Table, c: Config) -> None:
    """The language model of bytes whose uncertainty ends a patch: small, so degrees beyond its heads hold it whole."""
    patcher = c.nested("patcher_config", hidden_size=768, num_attention_heads=12, num_hidden_layers=14,
                       intermediate_size=2048, vocab_size=260)  # fmt: skip
    hidden = patcher.count("hidden_size")
    vocab = Padded("patcher_vocab", patcher.count("vocab_size"), noun="bytes").each()
    with _layers(t, patcher, "patcher", "patcher_", or_whole=True):
        t.embedding("@embed_tokens", vocab, hidden)
        t.norm("@norm", hidden)
        t.linear("@lm_head", vocab, hidden, role="head")


@contextmanager
def _layers(t: Table, c: Config, at: str, axes: str, *, or_whole: bool = False) -> Iterator[None]:
    """Llama's layers of one of the models, and with them what is said inside."""
    heads, hidden, size = _heads(c, axes, or_whole), c.count("hidden_size"), _size(c)
    width = c.count("intermediate_size", default=8 * hidden // 3)
    ffn = Units(f"{axes}ffn", width, noun="feed-forward channels", or_whole=or_whole).each()
    with t.stack(c.count("num_hidden_layers"), prefixes=(f"model.{at}.", f"{at}.")):
        layer = "@layers.{layer}"
        attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden)
        gated_mlp(t, f"{layer}.mlp", ffn, hidden)
        norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
        yield


def _cross_attention(t: Table, c: Config, at: str, axes: str, *, every: bool) -> None:
    """Attention between bytes and patches, in every layer or once; its norms come before its matrices."""
    heads, hidden, size = _heads(c, axes, False), c.count("hidden_size"), _size(c)
    count = c.count("num_hidden_layers") if c.flag("cross_attn_all_layers", default=every) else 1
    with t.stack(count, prefixes=(f"model.{at}.", f"{at}.")):
        layer = "@cross_attn_layers.{layer}"
        attention(t, layer, heads.query(size), heads.kv(size), hidden)
        for name in ("q_norm", "k_norm"):
            t.whole(f"{layer}.{name}.weight", hidden, why="a norm of what comes in, before the matrix")


def _heads(c: Config, axes: str, or_whole: bool) -> Heads:
    count = c.count("num_attention_heads")
    return Heads(f"{axes}heads", count, c.count("num_key_value_heads", default=count), or_whole=or_whole)


def _size(c: Config) -> int:
    return c.count("hidden_size") // c.count("num_attention_heads")


def _hashes(c: Config) -> int:
    """A part of the table for every size of a group and every hash function."""
    sizes = c.get("encoder_hash_byte_group_size", default=[3, 4, 5, 6, 7, 8])
    functions = c.count("encoder_hash_byte_group_nb_functions", default=1)
    return len(sizes) * functions * c.count("encoder_hash_byte_group_vocab", default=500_002)
