"""Wav2Vec2-BERT: a conformer over mel features, with a norm over all channels after the convolution along time.

Source: transformers ``models/wav2vec2_bert/modeling_wav2vec2_bert.py``.
"""

from __future__ import annotations

from tpshard.blocks.speech import AFTER, INTO, conformer_layer, ctc_head, encoder_channels, encoder_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "wav2vec2_bert"
MODEL_TYPES = ("wav2vec2-bert",)


def table(c: Config) -> Table:
    hidden = c.count("hidden_size", default=1024)
    heads, size = encoder_heads(c, width=hidden)

    t = Table(c.count("num_hidden_layers"), prefixes=("wav2vec2_bert.", ""))
    t.whole_module("@feature_projection", why=INTO)
    t.whole("@masked_spec_embed", hidden, why="what masked steps are replaced with in training", optional=True)
    layer = "@encoder.layers.{layer}"
    kernel = c.count("conv_depthwise_kernel_size", default=31)
    conformer_layer(t, layer, heads, size, encoder_channels(c), hidden, kernel, causal=True)
    kind = c.get("position_embeddings_type", default="relative_key")
    at = f"{layer}.self_attn"
    if kind == "relative":
        t.linear(f"{at}.linear_pos", heads.kv(size), hidden, role="k")
        for name in ("pos_bias_u", "pos_bias_v"):
            t.tensor(f"{at}.{name}", heads.query(1), size, role="attn_head")
    elif kind == "relative_key":
        left = c.count("left_max_position_embeddings", default=64)
        rows = left + c.count("right_max_position_embeddings", default=8) + 1
        t.whole(f"{at}.distance_embedding.weight", rows, size, why="distances, which all heads share")
    out = hidden
    if c.flag("add_adapter", default=False):
        out = c.count("output_hidden_size", default=hidden)
        t.whole_module("@adapter", why=AFTER)
    if c.flag("use_intermediate_ffn_before_adapter", default=False):
        t.whole_module("@intermediate_ffn", why=AFTER)
    ctc_head(t, c, out)
    for name in ("projector", "classifier", "tdnn", "objective"):
        t.whole_module(name, why=AFTER, optional=True)
    t.whole("layer_weights", None, why=AFTER, optional=True)
    return t
