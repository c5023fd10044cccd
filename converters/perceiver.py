"""Perceiver IO for text: latents that look at bytes, then at each other, and a decoder that looks at the latents.

The blocks share one set of layers. Heads and channels of the three kinds of attention are axes of their own.
Source: transformers ``models/perceiver/modeling_perceiver.py`` (``PerceiverForMaskedLM``); arXiv 2107.14795.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import attention, mlp, vocabulary_of
from tpshard.blocks.encoders import layer_norms
from tpshard.config import Config
from tpshard.table import AFTER_SUM, Table

FAMILY = "perceiver"
MODEL_TYPES = ("perceiver",)
_DECODER_HEADS, _DECODER_KEYS = 8, 8 * 32  # of the class for masked words, whatever the config says


def table(c: Config) -> Table:
    latents, model, vocab = c.count("d_latents", default=1280), c.count("d_model", default=768), vocabulary_of(c)
    positions = c.count("max_position_embeddings", default=2048)
    by_key = c.get("cross_attention_shape_for_attention", default="kv") == "kv"
    keys = c.count("qk_channels", default=model if by_key else latents)
    values = c.count("v_channels", default=keys)
    own_keys = c.count("qk_channels", default=latents)
    own_values = c.count("v_channels", default=own_keys)
    cross, single = c.count("num_cross_attention_heads", default=8), c.count("num_self_attention_heads", default=8)
    wide = c.count("cross_attention_widening_factor", default=1)

    t = Table(c.count("num_self_attends_per_block", default=26), prefixes=("perceiver.", ""))
    t.whole("@embeddings.latents", c.count("num_latents", default=256), latents, why="where the residual stream begins")
    t.embedding("@input_preprocessor.embeddings", vocab, model)
    t.embedding("@input_preprocessor.position_embeddings", positions, model, role="position")
    _layer(t, "@encoder.cross_attention", "cross", cross, (keys, values), latents, model, wide)
    widening = c.count("self_attention_widening_factor", default=1)
    _layer(t, "@encoder.self_attends.{layer}", "self", single, (own_keys, own_values), latents, None, widening)
    decoder = "@decoder.decoding_cross_attention"
    _layer(t, decoder, "decoder", _DECODER_HEADS, (_DECODER_KEYS, model), model, latents, 1)
    t.tensor("@decoder.output_position_encodings.position_embeddings", positions, model, role="position")
    t.tensor("embedding_decoder.bias", vocab, role="head_bias", optional=True)
    return t


def _layer(
    t: Table, at: str, axis: str, count: int, channels: tuple[int, int], width: int, other: int | None, widening: int
) -> None:
    """Attention of the ``width`` channels to themselves or to the ``other``, and an MLP."""
    heads = Heads(f"{axis}_heads", count, count)
    keys, values = channels
    names = ("self.query", "self.key", "self.value", "output.dense")
    attention(
        t, f"{at}.attention", heads.query(keys // count), heads.kv(keys // count), width, v=heads.kv(values // count),
        o=heads.query(values // count), bias=True, out_bias=True, names=names, kv_from=other,
    )  # fmt: skip
    layer_norms(t, [f"{at}.attention.self.layernorm1"], width, note=AFTER_SUM)
    if other is not None:
        layer_norms(t, [f"{at}.attention.self.layernorm2"], other, note=AFTER_SUM)
    layer_norms(t, [f"{at}.layernorm"], width)
    ffn = Units(f"{axis}_ffn", widening * width, noun="feed-forward channels").each()
    mlp(t, f"{at}.mlp", ffn, width, names=("dense1", "dense2"))
