"""The vision towers of Qwen3-VL, Qwen3.5 and Cohere Compass, with mergers after the last layer and, but for Qwen3.5,
after some before it.

q, k, v are three blocks of one matrix; positions are learned.
Source: transformers ``models/qwen3_vl/modeling_qwen3_vl.py``, ``models/cohere_compass/modeling_cohere_compass.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import input_norm, projector
from tpshard.blocks.dense import mlp, norms
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.table import Table

FAMILY = "qwen3_vision"
_OMNI = "qwen3_omni_moe_vision_encoder"
_DEEP = ("qwen3_vl_vision", "qwen3_vl_moe_vision", _OMNI, "cohere_compass_vision")
MODEL_TYPES = (*_DEEP, "qwen3_5_vision", "qwen3_5_moe_vision", "qwen4_exp_vision")
_USUAL = {"depth": 27, "num_heads": 16, "hidden_size": 1152, "intermediate_size": 4304, "in_channels": 3,
          "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
          "out_hidden_size": 3584}  # fmt: skip
USUAL = {kind: {**_USUAL, "deepstack_visual_indexes": [8, 16, 24] if kind in _DEEP else []} for kind in MODEL_TYPES}


def table(c: Config) -> Table:
    width, count = c.count("hidden_size"), c.count("num_heads", "num_attention_heads")
    heads, size = Heads("heads", count, count), width // count
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    patch, merged = c.count("patch_size"), c.count("spatial_merge_size") ** 2 * width
    deep = c.get("deepstack_visual_indexes", default=[])
    if not isinstance(deep, list):
        raise DamagedError(f"config.json: 'deepstack_visual_indexes' is {deep!r:.80}, not a list; restore it")

    t = Table(c.count("depth", "num_hidden_layers"))
    t.tensor(
        "@patch_embed.proj.weight", width, c.count("in_channels"), c.count("temporal_patch_size"),
        patch, patch, role="vision",
    )  # fmt: skip
    t.tensor("@patch_embed.proj.bias", width, role="vision_bias")
    t.embedding("@pos_embed", c.count("num_position_embeddings"), width, role="position")
    layer = "@blocks.{layer}"
    t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, width, role="qkv", bias=True)
    t.linear(f"{layer}.attn.proj", width, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", ffn, width, names=("linear_fc1", "linear_fc2"))
    norms(t, layer, ("norm1", "norm2"), width, bias=True)
    norm, names, more = "norm", ("linear_fc1", "linear_fc2"), "@deepstack_merger_list.{layer}"
    if c.model_type == _OMNI:
        norm, names, more = "ln_q", ("mlp.0", "mlp.2"), "@merger_list.{layer}"
    input_norm(t, f"@merger.{norm}", width)
    projector(t, "@merger", merged, merged, c.count("out_hidden_size"), names=names)
    with t.stack(len(deep)):
        input_norm(t, f"{more}.{norm}", merged)
        projector(t, more, merged, merged, c.count("out_hidden_size"), names=names)
    return t
