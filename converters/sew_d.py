"""SEW-D: SEW's convolutions and squeezing around the layers of DeBERTa-v2.

Queries and keys of positions go through the same matrices as those of the content (``share_att_key``) or their own.
Source: transformers ``models/sew_d/modeling_sew_d.py``.
"""

from __future__ import annotations

from tpshard.blocks.speech import AFTER, INTO, PLACES, WAVE, ctc_head, encoder_channels, encoder_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "sew_d"
MODEL_TYPES = ("sew-d",)


def table(c: Config) -> Table:
    hidden = c.count("hidden_size", default=768)
    heads, size = encoder_heads(c, width=hidden)
    ffn = encoder_channels(c).each()

    t = Table(c.count("num_hidden_layers"), prefixes=("sew_d.", ""))
    t.whole_module("@feature_extractor", why=WAVE)
    t.norm("@layer_norm", None, bias=True)  # as wide as the last convolution
    t.whole_module("@feature_projection", why=INTO, optional=True)  # where that is as wide as the model there is none
    t.whole("@masked_spec_embed", hidden, why="what masked steps are replaced with in training", optional=True)
    t.whole_module("@encoder.pos_conv_embed", why=PLACES)
    t.whole_module("@encoder.upsample", why=AFTER)
    if c.flag("relative_attention", default=True):
        buckets = c.get("position_buckets", default=256)
        rows = 2 * (buckets if buckets > 0 else c.count("max_position_embeddings", default=512))
        t.embedding("@encoder.encoder.rel_embeddings", rows, hidden, role="position")
        if "layer_norm" in str(c.get("norm_rel_ebd", default="layer_norm")):
            t.norm("@encoder.encoder.LayerNorm", hidden, bias=True)
    layer = "@encoder.encoder.layer.{layer}"
    at = f"{layer}.attention.self"
    t.linear(f"{at}.query_proj", heads.query(size), hidden, role="q", bias=True)
    t.linear(f"{at}.key_proj", heads.kv(size), hidden, role="k", bias=True)
    t.linear(f"{at}.value_proj", heads.kv(size), hidden, role="v", bias=True)
    if not c.flag("share_att_key", default=True):
        t.linear(f"{at}.pos_key_proj", heads.kv(size), hidden, role="k", bias=True, optional=True)
        t.linear(f"{at}.pos_query_proj", heads.query(size), hidden, role="q", bias=True, optional=True)
    t.linear(f"{layer}.attention.output.dense", hidden, heads.query(size), role="o", bias=True)
    t.norm(f"{layer}.attention.output.LayerNorm", hidden, bias=True)
    t.linear(f"{layer}.intermediate.dense", ffn, hidden, role="up", bias=True)
    t.linear(f"{layer}.output.dense", hidden, ffn, role="down", bias=True)
    t.norm(f"{layer}.output.LayerNorm", hidden, bias=True)
    ctc_head(t, c, hidden)
    for name in ("projector", "classifier"):
        t.whole_module(name, why=AFTER, optional=True)
    t.whole("layer_weights", None, why=AFTER, optional=True)
    return t
