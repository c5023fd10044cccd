"""Hunyuan-VL and HunyuanOCR: a ViT whose merger is convolutions, one matrix, and marks around an image.

Source: transformers ``models/hunyuan_vl/modeling_hunyuan_vl.py``, ``conversion_mapping.py`` (``hunyuan_vl``: the hub's
names are ``vit``, ``dense_h_to_4h``, ``perceive``).
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config
from tpshard.blocks.dense import attention, channels_of, mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "hunyuan_vl"
MODEL_TYPES = ("hunyuan_vl", "hunyuan_vl_vision")
USUAL = {
    "hunyuan_vl_vision": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                          "num_attention_heads": 16, "num_channels": 3, "patch_size": 16, "max_image_size": 2048,
                          "spatial_merge_size": 2},
}  # fmt: skip
MERGER = "convolutions over patches, and what goes around an image"


def table(c: Config) -> Table:
    if c.model_type == "hunyuan_vl_vision":
        return _tower(c)
    text = language_config(c, "text_config", model_type="hunyuan_vl_text", tied=True)
    released = c.nested("vision_config", model_type="hunyuan_vl_vision")
    tower = part_of(
        Config({"vision_config": released.with_usual(text_hidden_size=text.count("hidden_size")).values}),
        "vision_config", model_type="hunyuan_vl_vision",
    )  # fmt: skip

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vit", "vision_tower")
    return t


def _tower(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size, out = Heads("heads", count, count), c.head_dim(count), c.count("text_hidden_size", "out_hidden_size")
    patch, merge = c.count("patch_size"), c.count("spatial_merge_size")

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@embeddings.patch_embedding.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor("@embeddings.patch_embedding.bias", hidden, role="vision_bias")
    t.embedding("@embeddings.position_embedding", None, hidden, role="position")
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden, names=("dense_h_to_4h", "dense_4h_to_h"))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
    for conv, rows, into, side in (("proj.0", 2 * hidden, hidden, merge), ("proj.2", 4 * hidden, 2 * hidden, 1)):
        t.whole(f"@perceive.{conv}.weight", rows, into, side, side, why=MERGER)
        t.whole(f"@perceive.{conv}.bias", rows, why=MERGER)
    t.whole("@perceive.mlp.weight", out, 4 * hidden, why=MERGER)
    t.whole("@perceive.mlp.bias", out, why=MERGER)
    t.whole("@perceive.image_newline", 4 * hidden, why=MERGER)
    for mark in ("image_begin", "image_end", "image_sep"):
        t.whole(f"@perceive.{mark}", out, why=MERGER)
    t.norm("@perceive.before_rms", hidden)
    t.norm("@perceive.after_rms", out)
    return t
