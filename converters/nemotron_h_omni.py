"""Nemotron-H Omni: a RADIO tower, patches joined and normalised, two matrices, a Nemotron-H.

RADIO is a ViT with q, k and v in one matrix, scales on what a block adds, and tokens of its own before the patches.
Source: transformers ``models/{nemotron_h_omni,radio}/modeling_*.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import input_norm, language_config, projector
from tpshard.blocks.dense import mlp, norms
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "nemotron_h_omni"
MODEL_TYPES = ("nemotron_h_omni", "radio")
MOMENTS = ("mean", "std")
SCALE = "a scale of the summed output, like a norm's"


def table(c: Config) -> Table:
    if c.model_type == "radio":
        return _tower(c)
    text = language_config(c, "text_config", "llm_config", model_type="nemotron_h")
    tower = part_of(c, "vision_config", model_type="radio")
    ratio = c.get("downsample_ratio", default=0.5)
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise DamagedError(f"config.json: 'downsample_ratio' is {ratio!r:.80}, not a number up to 1; correct it")
    width = tower.count("hidden_size")
    joined = width * int(1 / ratio) ** 2

    t = Table(0)
    t.include(table_of(text), ("language_model.backbone.", "language_model."))
    place = "vision_model.radio_model."
    t.include(table_of(tower), (place, place), axes="vision_", or_whole=True)
    input_norm(t, "mlp1.0", joined, bias=False)
    channels = c.count("projector_hidden_size", default=4096)
    projector(t, "mlp1", joined, channels, text.count("hidden_size"), bias=False, names=("1", "3"))
    if text.number("num_nextn_predict_layers"):  # the norm came with the prediction layers
        t.norm("vision_projector.vision_final_layernorm", width, bias=True)
    return t


def _tower(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    heads, size, layer = Heads("heads", count, count), c.head_dim(count), "@model.blocks.{layer}"
    width = int(c.get("mlp_ratio", default=4.0) * hidden)
    values = c.count("patch_dim", default=c.count("num_channels", default=3) * patch * patch)

    t = Table(c.count("num_hidden_layers"), prefixes=("radio_model.",))
    at = "@model.patch_generator"
    t.tensor(f"{at}.embedder.weight", hidden, values, role="vision")
    if c.get("video_temporal_patch_size") is not None:
        frames = c.count("video_patch_dim", default=values * c.count("video_temporal_patch_size"))
        t.tensor(f"{at}.video_embedder.weight", hidden, frames, role="vision")
    t.tensor(f"{at}.pos_embed", 1, (c.count("max_img_size", default=2048) // patch) ** 2, hidden, role="position")
    tokens = c.number("num_cls_tokens", default=3) + c.number("num_registers", default=7)
    t.tensor(f"{at}.cls_token.token", tokens, hidden, role="vision")
    for name, shape in (("summary_idxs", (None,)), *((f"input_conditioner.norm_{n}", (3, 1, 1)) for n in MOMENTS)):
        t.tensor(f"@{name}", *shape, role="buffer", optional=True)
    qkv = heads.query(size) + heads.kv(size) * 2
    t.linear(f"{layer}.attn.qkv", qkv, hidden, role="qkv", bias=c.flag("qkv_bias", default=True))
    t.linear(f"{layer}.attn.proj", hidden, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", Units("ffn", width, noun="feed-forward channels").each(), hidden)
    for number in (1, 2):
        t.whole(f"{layer}.layer_scale{number}.lambda1", hidden, why=SCALE)
    norms(t, layer, ("norm1", "norm2"), hidden, bias=True)
    return t
