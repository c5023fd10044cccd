"""ViT and those that keep its names: DeiT, BEiT, DINOv2, MAE, MSN, VideoMAE, ViViT, I-JEPA, YOLOS, data2vec.

Heads and channels are cut; patches, positions, scales of the residual and what classifies are whole. BEiT's
tables of relative positions have a column a head.
Source: transformers ``models/{vit,deit,beit,dinov2,dinov2_with_registers,vit_mae,vit_msn,videomae,vivit,ijepa,yolos,
data2vec}/modeling_*.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from math import prod

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import channels_of, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "vit"
DINO = ("dinov2", "dinov2_with_registers")
BEIT = ("beit", "data2vec-vision")
VIDEO = ("videomae", "vivit")
MODEL_TYPES = (*DINO, *BEIT, *VIDEO, "deit", "ijepa", "vit", "vit_mae", "vit_msn", "yolos")
SCALE = "scales what is summed over ranks already"
TOKENS = {"deit": 2, "ijepa": 0}  # before the patches; 1 elsewhere


def table(c: Config) -> Table:
    kind, hidden, count = c.model_type, c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", count, count), hidden // count
    base = {"data2vec-vision": "data2vec_vision", "vit_mae": "vit", "vit_msn": "vit"}.get(kind, kind)

    t = Table(c.count("num_hidden_layers"), prefixes=(f"{base}.", ""))
    _embeddings(t, c, hidden)
    layer = "@encoder.layer.{layer}"
    _attention(t, c, f"{layer}.attention", heads, size, hidden)
    if kind in DINO:
        _dino(t, c, layer, hidden)
    else:
        mlp(t, layer, channels_of(c), hidden, names=("intermediate.dense", "output.dense"))
        norms(t, layer, ("layernorm_before", "layernorm_after"), hidden, bias=True)
    if kind in BEIT and (c.get("layer_scale_init_value", default=0.1) or 0) > 0:
        for scale in ("lambda_1", "lambda_2"):
            t.whole(f"{layer}.{scale}", hidden, why=SCALE)
    _end(t, c, hidden)
    return t


def _patches(c: Config) -> int:
    """Patches of an image, or of all frames."""
    sides = c.get("image_size")
    heights = sides if isinstance(sides, list) else [sides, sides]
    counts = [Config({"image_size": side}).count("image_size") for side in heights]
    patch = _patch(c)
    if len(patch) == 3:
        counts = [c.count("num_frames", default=16), *counts]
    return prod(length // step for length, step in zip(counts, patch, strict=True))


def _patch(c: Config) -> list[int]:
    """Lengths of a patch: frames (of videos), height, width."""
    tubelet = c.get("tubelet_size")
    if isinstance(tubelet, list):
        return [Config({"tubelet_size": length}).count("tubelet_size") for length in tubelet]
    side = c.count("patch_size")
    return [side, side] if tubelet is None else [c.count("tubelet_size"), side, side]


def _embeddings(t: Table, c: Config, hidden: int) -> None:
    kind, at = c.model_type, "@embeddings"
    t.tensor(f"{at}.patch_embeddings.projection.weight", hidden, c.count("num_channels"), *_patch(c), role="vision")
    t.tensor(f"{at}.patch_embeddings.projection.bias", hidden, role="vision_bias")
    if kind not in ("ijepa", "videomae"):
        t.tensor(f"{at}.cls_token", 1, 1, hidden, role="vision")
    tokens = TOKENS.get(kind, 1)
    if kind == "deit":
        t.tensor(f"{at}.distillation_token", 1, 1, hidden, role="vision")
    if kind == "yolos":
        more = c.count("num_detection_tokens")
        tokens += more
        t.tensor(f"{at}.detection_tokens", 1, more, hidden, role="vision")
    if kind == "dinov2_with_registers":
        t.tensor(f"{at}.register_tokens", 1, c.count("num_register_tokens", default=4), hidden, role="vision")
    if kind in DINO:
        t.tensor(f"{at}.mask_token", 1, hidden, role="vision", optional=kind == "dinov2")
    elif kind in ("vit", "deit", "ijepa", *BEIT):  # of pre-training
        t.tensor(f"{at}.mask_token", 1, 1, hidden, role="vision", optional=True)
    learned = kind != "videomae" and (kind not in BEIT or c.flag("use_absolute_position_embeddings", default=False))
    if learned:
        t.tensor(f"{at}.position_embeddings", 1, _patches(c) + tokens, hidden, role="position")
    if kind == "yolos" and c.flag("use_mid_position_embeddings", default=True):
        layers = c.count("num_hidden_layers") - 1
        t.tensor("@encoder.mid_position_embeddings", layers, 1, _patches(c) + tokens, hidden, role="position")


def _attention(t: Table, c: Config, at: str, heads: Heads, size: int, hidden: int) -> None:
    kind, q = c.model_type, heads.query(size)
    for part, role in (("query", "q"), ("key", "k"), ("value", "v")):
        bias = kind not in VIDEO[:1] and not (kind in BEIT and role == "k") and c.flag("qkv_bias", default=True)
        t.linear(f"{at}.attention.{part}", q if role == "q" else heads.kv(size), hidden, role=role, bias=bias)
    if kind == "videomae" and c.flag("qkv_bias", "qv_bias", default=True):
        t.tensor(f"{at}.attention.q_bias", q, role="q_bias")
        t.tensor(f"{at}.attention.v_bias", heads.kv(size), role="v_bias")
    t.linear(f"{at}.output.dense", hidden, q, role="o", bias=True)
    if kind in BEIT:
        for shared, place in ((False, f"{at}.attention"), (True, "@encoder")):
            if c.flag(f"use_{'shared_' if shared else ''}relative_position_bias", default=False):
                table_of_all = f"{place}.relative_position_bias.relative_position_bias_table"
                t.tensor(table_of_all, None, heads.query(1), role="attn_head")
                index = f"{place}.relative_position_bias.relative_position_index"
                t.tensor(index, None, None, role="buffer", optional=True)


def _dino(t: Table, c: Config, layer: str, hidden: int) -> None:
    width = int(hidden * c.get("mlp_ratio", default=4))
    gated = c.flag("use_swiglu_ffn", default=False)
    if gated:
        width = (int(width * 2 / 3) + 7) // 8 * 8
    ffn = Units("ffn", width, noun="feed-forward channels").each()
    if gated:
        t.linear(f"{layer}.mlp.weights_in", ffn * 2, hidden, role="gate_up", bias=True)
        t.linear(f"{layer}.mlp.weights_out", hidden, ffn, role="down", bias=True)
    else:
        mlp(t, f"{layer}.mlp", ffn, hidden)
    norms(t, layer, ("norm1", "norm2"), hidden, bias=True)
    for scale in ("layer_scale1", "layer_scale2"):
        t.whole(f"{layer}.{scale}.lambda1", hidden, why=SCALE)


def _end(t: Table, c: Config, hidden: int) -> None:
    pooled = c.model_type in (*BEIT, "videomae") and c.flag("use_mean_pooling", default=True)
    if c.model_type not in (*BEIT, "videomae"):
        t.norm("@layernorm", hidden, bias=True)
    elif not pooled:
        t.norm("@layernorm", hidden, bias=True, optional=c.model_type == "videomae")
    for norm in ("@pooler.layernorm", "fc_norm") if pooled else ():
        t.norm(norm, hidden, bias=True, optional=True)
    t.linear("@pooler.dense", None, hidden, role="pooler", bias=True, optional=True)
    for head in ("classifier", "cls_classifier", "distillation_classifier"):
        t.linear(head, None, None, role="head_projection", bias=None, optional=True)
