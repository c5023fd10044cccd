"""InternVL's vision tower: BEiT's names, a learned scale on what attention and MLP give.

Norms of q and k, where there are any, are over all heads, so they are cut and need a sum.
Source: transformers ``models/internvl/modeling_internvl.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.dense import attention, channels_of, mlp, norms
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.table import Table

FAMILY = "internvl_vision"
MODEL_TYPES = ("internvl_vision",)
USUAL = {
    "internvl_vision": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                        "num_attention_heads": 16, "num_channels": 3, "image_size": [448, 448],
                        "patch_size": [14, 14]},
}  # fmt: skip


def table(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", count, count), c.head_dim(count)
    (height, width), (patch_height, patch_width) = _pair(c, "image_size"), _pair(c, "patch_size")
    norm_bias = c.get("norm_type", default="layer_norm") == "layer_norm"

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@embeddings.cls_token", 1, 1, hidden, role="vision")
    if c.flag("use_mask_token", default=False):
        t.tensor("@embeddings.mask_token", 1, 1, hidden, role="vision")
    channels = c.count("num_channels", default=3)
    t.tensor(
        "@embeddings.patch_embeddings.projection.weight", hidden, channels, patch_height, patch_width, role="vision"
    )
    t.tensor("@embeddings.patch_embeddings.projection.bias", hidden, role="vision_bias")
    if c.flag("use_absolute_position_embeddings", default=True):
        patches = (height // patch_height) * (width // patch_width)
        t.tensor("@embeddings.position_embeddings", 1, patches + 1, hidden, role="position")
    layer = "@encoder.layer.{layer}"
    attention(
        t, f"{layer}.attention", heads.query(size), heads.kv(size), hidden,
        bias=c.flag("attention_bias", default=False), out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "projection_layer"),
    )  # fmt: skip
    if c.flag("use_qk_norm", default=False):
        t.norm(f"{layer}.attention.q_norm", heads.query(size))
        t.norm(f"{layer}.attention.k_norm", heads.kv(size))
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    for scale in ("lambda_1", "lambda_2"):
        t.whole(f"{layer}.{scale}", hidden, why="a scale of the summed output, like a norm's")
    norms(t, layer, ("layernorm_before", "layernorm_after"), hidden, bias=norm_bias)
    if not c.flag("use_mean_pooling", default=True):
        t.norm("@layernorm", hidden, bias=True)
    return t


def _pair(c: Config, name: str) -> tuple[int, int]:
    """Height and width, which the config gives as two numbers or as one."""
    value = c.get(name)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise DamagedError(f"config.json: '{name}' is {value!r:.80}, not one or two whole numbers; correct it")
    return sides[0], sides[1]
