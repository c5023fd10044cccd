"""Qianfan-OCR: InternVL's tower under its first names, patches joined and normalised, two matrices, a Qwen3.

Queries, keys and values are one matrix on disk. Files that transformers 5 saves call the language model's layers
``encoder.layers``, as the tower's.
Source: transformers ``models/qianfan_ocr/modeling_qianfan_ocr.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import (
    LANGUAGE,
    include_respelt,
    include_tower,
    input_norm,
    language_config,
    projector,
)
from tpshard.blocks.dense import channels_of, mlp, norms
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "qianfan_ocr"
USUAL = {
    "qianfan_ocr_vision": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                           "num_attention_heads": 16, "num_channels": 3, "image_size": [448, 448],
                           "patch_size": [14, 14]},
}  # fmt: skip
MODEL_TYPES = ("qianfan_ocr", *USUAL)


def table(c: Config) -> Table:
    if c.model_type == "qianfan_ocr_vision":
        return _tower(c)
    text = language_config(c, "text_config", model_type="qwen3")
    tower = part_of(c, "vision_config", model_type="qianfan_ocr_vision")
    ratio = c.get("downsample_ratio", default=0.5)
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise DamagedError(f"config.json: 'downsample_ratio' is {ratio!r:.80}, not a number up to 1; correct it")
    hidden, joined = text.count("hidden_size"), tower.count("hidden_size") * int(1 / ratio) ** 2

    t = Table(0)
    include_respelt(t, table_of(text), {"@layers.": "@encoder.layers."}, *LANGUAGE)
    include_tower(t, tower, "vision_model")
    input_norm(t, "mlp1.0", joined)
    projector(t, "mlp1", joined, hidden, hidden, names=("1", "3"))
    return t


def _tower(c: Config) -> Table:
    hidden, count, layer = c.count("hidden_size"), c.count("num_attention_heads"), "@encoder.layers.{layer}"
    heads, size = Heads("heads", count, count), c.head_dim(count)
    image, patch = (_sides(c, key) for key in ("image_size", "patch_size"))
    places = (image[0] // patch[0]) * (image[1] // patch[1]) + 1

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@embeddings.class_embedding", 1, 1, hidden, role="vision")
    t.tensor("@embeddings.patch_embedding.weight", hidden, c.count("num_channels"), *patch, role="vision")
    t.tensor("@embeddings.patch_embedding.bias", hidden, role="vision_bias")
    t.tensor("@embeddings.position_embedding", 1, places, hidden, role="position")
    bias = c.flag("attention_bias", default=True)
    t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv", bias=bias)
    t.linear(f"{layer}.attn.proj", hidden, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    for scale in ("ls1", "ls2"):
        t.whole(f"{layer}.{scale}", hidden, why="a scale of the summed output, like a norm's")
    norms(t, layer, ("norm1", "norm2"), hidden, bias=c.get("norm_type", default="layer_norm") == "layer_norm")
    return t


def _sides(c: Config, key: str) -> tuple[int, int]:
    """Height and width, which the config gives as two numbers or as one."""
    value = c.get(key)
    pair = value if isinstance(value, list) and len(value) == 2 else [value, value]
    height, width = (Config({key: side}).count(key) for side in pair)
    return height, width
