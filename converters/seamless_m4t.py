"""SeamlessM4T: encoders of text and of speech, a decoder of text, a model that turns text into units, a vocoder.

Which of them a checkpoint holds its class tells. The first version's units are written one by one by a decoder that
attends; the second's come all at once from convolutions, in pairs that are cut like a feed-forward.
Source: transformers ``models/seamless_m4t/modeling_seamless_m4t.py``, ``models/seamless_m4t_v2/...``.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.dense import mlp
from tpshard.blocks.encdec import attend, side_axes
from tpshard.blocks.speech import (
    DENSE,
    INTO,
    conformer_layer,
    encoder_attention,
    encoder_channels,
    encoder_heads,
)  # fmt: skip
from tpshard.config import Config
from tpshard.table import ADDED_ONCE, Table

FAMILY = "seamless_m4t"
MODEL_TYPES = ("seamless_m4t", "seamless_m4t_v2")
COUNTS = {"hidden_size": 1024, "vocab_size": 256_102, "t2u_vocab_size": 10_082, "char_vocab_size": 10_943}
SIDES = {f"{part}{side}_{what}": count
         for part, layers in (("", 24), ("t2u_", 6)) for side in ("encoder", "decoder")
         for what, count in (("layers", layers), ("ffn_dim", 8192), ("attention_heads", 16))}  # fmt: skip
ADAPTER = "a convolution over frames, with a gate: it makes a step of eight"
DURATIONS = "convolutions that say how long a unit lasts"
VOCODER = "convolutions that make a wave of units"


def table(c: Config) -> Table:
    c = c.with_usual(**COUNTS, **SIDES)
    width = c.count("hidden_size")
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(0)
    tied = c.flag("tie_word_embeddings", default=True)
    heads = ("lm_head.weight",) if tied else ()
    if not tied:
        t.tensor("lm_head.weight", vocab, width, role="head", optional=not _has(c, "Model", "ToText"))
    names = ("shared.weight", "text_encoder.embed_tokens.weight", "text_decoder.embed_tokens.weight")
    with t.stack(optional=not _has(c, "Model", "To")):
        t.shared(*names, heads=heads, vocab=vocab, width=width)
    for side, words in (("encoder", ("Model", "TextTo")), ("decoder", ("Model", "To"))):
        prefix = f"text_{side}."
        t.include(_side(c, side), (prefix, prefix), axes="text_", optional=not _has(c, *words))
    hears, speaks = _has(c, "Model", "SpeechTo"), _has(c, "Model", "ToSpeech")
    t.include(_speech(c), ("speech_encoder.", "speech_encoder."), axes="speech_", optional=not hears)
    t.include(_units(c), ("t2u_model.model.", "t2u_model."), axes="t2u_", optional=not speaks)
    with t.stack(optional=not speaks):
        t.whole_module("vocoder", why=VOCODER)
    return t


def _has(c: Config, *words: str) -> bool:
    """Whether the config's class, which ``architectures`` names, has one of ``words`` in its name."""
    named = c.get("architectures")
    return isinstance(named, list) and bool(named) and any(word in str(named[0]).split("M4T")[-1] for word in words)


def _side(c: Config, side: str, part: str = "") -> Table:
    """The ``encoder`` or the ``decoder`` of text, or of the model of units (``part``)."""
    width = c.count("hidden_size")
    own = Config({**c.values, **{key.removeprefix(part): c.get(key) for key in SIDES if part and key.startswith(part)}})
    heads, size, ffn = side_axes(own, side, width)
    t = Table(own.count(f"{side}_layers"))
    layer = "@layers.{layer}"
    attend(t, f"{layer}.self_attn", heads, size, width)
    if part and side == "decoder" and c.model_type == "seamless_m4t_v2":
        _convolutions(t, layer, width)
    else:
        if side == "decoder":
            attend(t, f"{layer}.cross_attention", heads, size, width)
        mlp(t, f"{layer}.ffn", ffn, width)
        t.norm(f"{layer}.ffn_layer_norm", width, bias=True)
    t.norm("@layer_norm", width, bias=True)
    return t


def _convolutions(t: Table, layer: str, width: int, kernel: int = 7) -> None:
    """Two convolutions with an activation between: the first by what it makes, the second by what it takes."""
    between = encoder_channels(Config({"intermediate_size": width})).each()
    t.tensor(f"{layer}.conv1.weight", between, width, kernel, role="up")
    t.tensor(f"{layer}.conv1.bias", between, role="up_bias")
    t.tensor(f"{layer}.conv2.weight", width, between, kernel, role="down")
    t.tensor(f"{layer}.conv2.bias", width, role="down_bias", note=ADDED_ONCE)
    t.norm(f"{layer}.conv_layer_norm", width, bias=True)


def _speech(c: Config) -> Table:
    """The conformer, one feed-forward more, and layers that make one step of eight."""
    width, layer = c.count("hidden_size"), "@encoder.layers.{layer}"
    second = c.model_type == "seamless_m4t_v2"
    heads, size = encoder_heads(c.with_usual(speech_encoder_attention_heads=16), "speech_encoder_attention_heads",
                                width=width)  # fmt: skip
    ffn = encoder_channels(c.with_usual(speech_encoder_intermediate_size=4096), "speech_encoder_intermediate_size")

    t = Table(c.count("speech_encoder_layers", default=24))
    t.whole_module("@feature_projection", why=INTO)
    conformer_layer(
        t, layer, heads, size, ffn, width, c.count("conv_depthwise_kernel_size", default=31), causal=second
    )
    at = f"{layer}.self_attn"
    kind = c.get("position_embeddings_type", default="relative_key" if second else "relative")
    if kind == "relative":
        t.linear(f"{at}.linear_pos", heads.kv(size), width, role="k")
        for name in ("pos_bias_u", "pos_bias_v"):
            t.tensor(f"{at}.{name}", heads.query(1), size, role="attn_head")
    elif kind == "relative_key":
        rows = c.count("left_max_position_embeddings", default=64) + c.count("right_max_position_embeddings", default=8)
        t.whole(f"{at}.distance_embedding.weight", rows + 1, size, why="distances, which all heads share")
    for norm in ("encoder.layer_norm", "inner_layer_norm"):
        t.norm(f"@{norm}", width, bias=True)
    mlp(t, "@intermediate_ffn", ffn.each(), width, names=DENSE)
    if c.flag("add_adapter", default=True):
        t.include(_adapter(c, width), ("adapter.", "adapter."))
    return t


def _adapter(c: Config, width: int) -> Table:
    heads, size = encoder_heads(c.with_usual(speech_encoder_attention_heads=16), "speech_encoder_attention_heads",
                                width=width)  # fmt: skip
    ffn = encoder_channels(c.with_usual(speech_encoder_intermediate_size=4096), "speech_encoder_intermediate_size")
    kernel, layer = c.count("adaptor_kernel_size", default=8), "@layers.{layer}"

    t = Table(c.count("num_adapter_layers", default=1))
    for name in ("residual_conv", "self_attn_conv"):
        t.whole(f"{layer}.{name}.weight", 2 * width, width, kernel, why=ADAPTER)
        t.whole(f"{layer}.{name}.bias", 2 * width, why=ADAPTER)
    names = ("linear_q", "linear_k", "linear_v", "linear_out")
    encoder_attention(t, f"{layer}.self_attn", heads, size, width, names=names)
    mlp(t, f"{layer}.ffn", ffn.each(), width, names=DENSE)
    for norm in ("residual_layer_norm", "self_attn_layer_norm", "ffn_layer_norm"):
        t.norm(f"{layer}.{norm}", width, bias=True)
    return t


def _units(c: Config) -> Table:
    """From text to units: an encoder of what the decoder of text makes, and a decoder."""
    width, vocab = c.count("hidden_size"), Padded("vocab", c.count("t2u_vocab_size")).each()
    t = Table(0)
    t.shared("@decoder.embed_tokens.weight", heads=("lm_head.weight",), vocab=vocab, width=width)
    for side in ("encoder", "decoder"):
        t.include(_side(c, side, "t2u_"), (f"model.{side}.", f"model.{side}."))
    if c.model_type == "seamless_m4t_v2":
        t.whole("@decoder.embed_char.weight", c.count("char_vocab_size"), width, why="a small table of characters")
        t.whole_module("@decoder.duration_predictor", why=DURATIONS)
        for name in ("pos_emb_alpha", "pos_emb_alpha_char"):
            t.whole(f"@decoder.{name}", 1, why="one number for all positions")
    return t
