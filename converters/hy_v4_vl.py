"""HY-V4-VL: HY-V4 with Hunyuan's ViT, whose merger is two convolutions over patches.

Source: transformers ``models/hy_v4_vl/modeling_hy_v4_vl.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config
from tpshard.blocks.dense import attention, channels_of, mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "hy_v4_vl"
USUAL = {
    "hy_v4_vl_vision": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 40,
                        "num_attention_heads": 16, "num_channels": 3, "patch_size": 16, "spatial_merge_size": 2,
                        "max_image_size": 2048, "out_hidden_size": 6144},
}  # fmt: skip
MODEL_TYPES = ("hy_v4_vl", *USUAL)
MERGER = "convolutions over patches, and what goes around an image"


def table(c: Config) -> Table:
    if c.model_type == "hy_v4_vl_vision":
        return _tower(c)
    t = Table(0, prefixes=MODEL)
    include_language(t, language_config(c, "text_config", model_type="hy_v4_vl_text"))
    include_tower(t, part_of(c, "vision_config", model_type="hy_v4_vl_vision"), "vit")
    return t


def _tower(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size, patch, merge = Heads("heads", count, count), c.head_dim(count), c.count("patch_size"), "@perceive"
    places, layer = (c.count("max_image_size") // patch) ** 2 + 1, "@layers.{layer}"
    out, side = c.count("out_hidden_size"), c.count("spatial_merge_size")

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@embeddings.patch_embedding.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor("@embeddings.patch_embedding.bias", hidden, role="vision_bias")
    t.embedding("@embeddings.position_embedding", places, hidden, role="position")
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden, names=("dense_h_to_4h", "dense_4h_to_h"))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
    t.norm(f"{merge}.norm", hidden)
    t.whole(f"{merge}.image_newline", out, why=MERGER)
    for number, rows, into, window in ((0, 4 * hidden, hidden, side), (2, out, 4 * hidden, 1)):
        t.whole(f"{merge}.proj.{number}.weight", rows, into, window, window, why=MERGER)
        t.whole(f"{merge}.proj.{number}.bias", rows, why=MERGER)
    return t
