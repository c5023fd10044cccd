"""wav2vec 2.0 and the speech encoders that kept its layers: HuBERT, WavLM, UniSpeech, SEW, data2vec, and conformers.

Attention and feed-forward are cut; the convolutions at the input and those that give positions stay whole, and so
do the heads of pre-training and classification. WavLM gates a table of relative positions head by head.
Source: transformers ``models/{wav2vec2,hubert,wavlm,unispeech,unispeech_sat,sew,data2vec,wav2vec2_conformer}``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.dense import mlp
from tpshard.blocks.speech import (
    AFTER,
    DENSE,
    INTO,
    PLACES,
    WAVE,
    conformer_layer,
    ctc_head,
    encoder_attention,
    encoder_channels,
    encoder_heads,
)  # fmt: skip
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "wav2vec2"
PREFIXES = {
    "data2vec-audio": "data2vec_audio.", "hubert": "hubert.", "sew": "sew.", "unispeech": "unispeech.",
    "unispeech-sat": "unispeech_sat.", "wav2vec2": "wav2vec2.", "wav2vec2-conformer": "wav2vec2_conformer.",
    "wavlm": "wavlm.",
}  # fmt: skip
MODEL_TYPES = tuple(PREFIXES)


def table(c: Config) -> Table:
    kind, hidden = c.model_type, c.count("hidden_size", default=768)
    heads, size = encoder_heads(c, width=hidden)
    ffn = encoder_channels(c)

    t = Table(c.count("num_hidden_layers"), prefixes=(PREFIXES[kind], ""))
    t.whole_module("@feature_extractor", why=WAVE)
    t.whole_module("@feature_projection", why=INTO, optional=kind == "sew")
    t.whole_module("@encoder.pos_conv_embed", why=PLACES)
    t.whole("@masked_spec_embed", hidden, why="what masked steps are replaced with in training", optional=True)
    layer = "@encoder.layers.{layer}"
    t.norm("@encoder.layer_norm", hidden, bias=True)
    if kind == "wav2vec2-conformer":
        kernel = c.count("conv_depthwise_kernel_size", default=31)
        conformer_layer(t, layer, heads, size, ffn, hidden, kernel)
        if c.get("position_embeddings_type", default="relative") == "relative":
            _relative(t, f"{layer}.self_attn", heads, size, hidden)
    else:
        encoder_attention(
            t, f"{layer}.attention", heads, size, hidden, names=("q_proj", "k_proj", "v_proj", "out_proj")
        )
        mlp(t, f"{layer}.feed_forward", ffn.each(), hidden, names=DENSE)
        for norm in ("layer_norm", "final_layer_norm"):
            t.norm(f"{layer}.{norm}", hidden, bias=True)
    if kind == "wavlm":
        _gated_positions(t, c, f"{layer}.attention", heads, size)
    if kind == "sew":
        t.whole_module("@encoder.upsample", why=AFTER)
        t.norm("@layer_norm", None, bias=True)  # as wide as the last convolution
    if c.get("adapter_attn_dim") is not None:
        _adapter(t, f"{layer}.adapter_layer", c.count("adapter_attn_dim"), hidden)
    _after(t, c, hidden)
    return t


def _relative(t: Table, at: str, heads: Heads, size: int, hidden: int) -> None:
    """Transformer-XL's positions: keys of their own, and two biases a head."""
    t.linear(f"{at}.linear_pos", heads.kv(size), hidden, role="k")
    for name in ("pos_bias_u", "pos_bias_v"):
        t.tensor(f"{at}.{name}", heads.query(1), size, role="attn_head")


def _gated_positions(t: Table, c: Config, at: str, heads: Heads, size: int) -> None:
    t.tensor(f"{at}.gru_rel_pos_const", 1, heads.query(1), 1, 1, role="attn_head")
    for part, dims in (("weight", (8, size)), ("bias", (8,))):
        t.whole(f"{at}.gru_rel_pos_linear.{part}", *dims, why="every head's queries go through the same")
    with t.only([0]):
        t.tensor(f"{at}.rel_attn_embed.weight", c.count("num_buckets", default=320), heads.query(1), role="attn_head")


def _adapter(t: Table, at: str, width: int, hidden: int) -> None:
    """MMS' adapter of a language behind every layer."""
    for name, dims in (("norm.weight", (hidden,)), ("norm.bias", (hidden,)), ("linear_1.weight", (width, hidden)),
                       ("linear_1.bias", (width,)), ("linear_2.weight", (hidden, width)), ("linear_2.bias", (hidden,))):
        t.whole(f"{at}.{name}", *dims, why="an adapter of a few channels, for one language")


def _after(t: Table, c: Config, hidden: int) -> None:
    """What follows the encoder: adapter, the heads of pre-training, classification and recognition."""
    out = hidden
    if c.flag("add_adapter", default=False):
        out = c.count("output_hidden_size", default=hidden)
        t.whole_module("@adapter", why=AFTER)
    ctc_head(t, c, out)
    for name in ("quantizer", "project_hid", "project_q", "projector", "classifier", "tdnn", "objective"):
        t.whole_module(name, why=AFTER, optional=True)
    t.whole("layer_weights", None, why=AFTER, optional=True)
