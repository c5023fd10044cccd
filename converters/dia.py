"""Dia: speech out of text, an encoder of letters and a decoder of codes with an embedding for every channel in one.

Source: transformers ``models/dia/modeling_dia.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import attention, fused_mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "dia"
MODEL_TYPES = ("dia",)
ENCODER = {
    "num_hidden_layers": 12, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
    "head_dim": 128, "intermediate_size": 4096, "vocab_size": 256,
}  # fmt: skip
DECODER = {
    "num_hidden_layers": 18, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 8192, "vocab_size": 1028, "num_channels": 9, "cross_num_attention_heads": 16,
    "cross_num_key_value_heads": 16, "cross_head_dim": 128, "cross_hidden_size": 1024,
}  # fmt: skip


def table(c: Config) -> Table:
    encoder, decoder = c.nested("encoder_config", **ENCODER), c.nested("decoder_config", **DECODER)
    hidden, width = encoder.count("hidden_size"), decoder.count("hidden_size")
    codes = decoder.count("num_channels") * decoder.count("vocab_size")
    all_codes = Padded("vocab", codes, noun="codes of all channels").each()
    t = Table(0)
    with t.stack(encoder.count("num_hidden_layers"), prefixes=("model.encoder.", "encoder.")):
        letters = Padded("letters", encoder.count("vocab_size"), noun="letters").each()
        t.embedding("@embedding", letters, hidden)
        layer = "@layers.{layer}"
        _attend(encoder, t, f"{layer}.self_attention", "encoder_heads", hidden)
        _mlp(encoder, t, f"{layer}.mlp", "encoder_ffn", hidden)
        norms(t, layer, ("pre_sa_norm", "post_sa_norm"), hidden)
        t.norm("@norm", hidden)
    with t.stack(decoder.count("num_hidden_layers"), prefixes=("model.decoder.", "decoder.")):
        t.embedding("@embeddings.embed", all_codes, width)
        _attend(decoder, t, f"{layer}.self_attention", "heads", width)
        source = decoder.count("cross_hidden_size")
        _attend(decoder, t, f"{layer}.cross_attention", "cross_heads", width, "cross_", source)
        _mlp(decoder, t, f"{layer}.mlp", "ffn", width)
        norms(t, layer, ("pre_sa_norm", "pre_ca_norm", "pre_mlp_norm"), width)
        t.norm("@norm", width)
    t.tensor("logits_dense.weight", all_codes, width, role="head", optional=True)
    return t


def _attend(c: Config, t: Table, at: str, axis: str, width: int, key: str = "", kv_from: int | None = None) -> None:
    heads = Heads(axis, c.count(f"{key}num_attention_heads"), c.count(f"{key}num_key_value_heads"))
    size = c.count(f"{key}head_dim")
    attention(t, at, heads.query(size), heads.kv(size), width, kv_from=kv_from)


def _mlp(c: Config, t: Table, at: str, axis: str, width: int) -> None:
    fused_mlp(t, at, Units(axis, c.count("intermediate_size"), noun="feed-forward channels").each(), width)
