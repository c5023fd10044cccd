"""Parakeet's encoder (a FastConformer), and the model that writes text with it.

Source: transformers ``models/parakeet/modeling_parakeet.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.dense import mlp
from tpshard.blocks.speech import conformer_convolution, encoder_attention, encoder_channels, encoder_heads, pointwise
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "parakeet"
MODEL_TYPES = ("parakeet_ctc", "parakeet_encoder")
USUAL = {"parakeet_encoder": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8,
                              "intermediate_size": 4096}}  # fmt: skip


def table(c: Config) -> Table:
    return _recognizer(c) if c.model_type == "parakeet_ctc" else _encoder(c)


def _recognizer(c: Config) -> Table:
    encoder = part_of(c, "encoder_config", model_type="parakeet_encoder")
    t = Table(0)
    t.include(table_of(encoder), ("encoder.", "encoder."))
    vocab = Padded("vocab", c.count("vocab_size", default=1025)).each()
    pointwise(t, "ctc_head", vocab, encoder.count("hidden_size"), role="head", bias=True)
    return t


def _encoder(c: Config) -> Table:
    hidden, bias = c.count("hidden_size"), c.flag("attention_bias", default=True)
    heads, size = encoder_heads(c, width=hidden)
    wide = c.flag("convolution_bias", default=True)

    t = Table(c.count("num_hidden_layers"))
    t.whole_module("@subsampling", why="convolutions over time and frequency, every channel of which sees all others")
    layer = "layers.{layer}"
    for half in ("feed_forward1", "feed_forward2"):
        mlp(t, f"{layer}.{half}", encoder_channels(c).each(), hidden, bias=bias, names=("linear1", "linear2"))
        t.norm(f"{layer}.norm_{half}", hidden, bias=True)
    at = f"{layer}.self_attn"
    encoder_attention(t, at, heads, size, hidden, names=("q_proj", "k_proj", "v_proj", "o_proj"), bias=bias)
    t.linear(f"{at}.relative_k_proj", heads.kv(size), hidden, role="k")
    for name in ("bias_u", "bias_v"):
        t.tensor(f"{at}.{name}", heads.query(1), size, role="attn_head")
    kernel = c.count("conv_kernel_size", default=9)
    conformer_convolution(t, f"{layer}.conv", hidden, kernel, batch_norm="norm", bias=wide)
    for norm in ("norm_self_att", "norm_conv", "norm_out"):
        t.norm(f"{layer}.{norm}", hidden, bias=True)
    return t
