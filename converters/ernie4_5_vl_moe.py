"""ERNIE 4.5 VL: text tokens and patches have experts of their own, of two widths, numbered one after the other.

The routers are stored input x output, ``gate.weight`` for text and ``gate.weight_1`` for patches; the tower is a ViT,
and a resampler joins patches that are neighbours in space and time.
Source: transformers ``models/ernie4_5_vl_moe/modeling_ernie4_5_vl_moe.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import MODEL, include_tower, language_config, projector, whole_projector
from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, mlp, norms
from tpshard.blocks.experts import mixed_layers, shared_channels
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "ernie4_5_vl_moe"
USUAL = {
    "ernie4_5_vl_moe_text": {"vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288,
                             "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
                             "moe_intermediate_size": [1536, 512], "moe_num_experts": 64},
    "ernie4_5_vl_moe_vision": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "in_channels": 3, "patch_size": 14,
                               "spatial_merge_size": 2, "intermediate_size": 5120, "temporal_merge_size": 2},
}  # fmt: skip
MODEL_TYPES = ("ernie4_5_vl_moe", *USUAL)


def table(c: Config) -> Table:
    kinds = {"ernie4_5_vl_moe": _whole, "ernie4_5_vl_moe_text": _text, "ernie4_5_vl_moe_vision": _vision}
    return kinds[c.model_type](c)


def _whole(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="ernie4_5_vl_moe_text", tied=True)
    tower = part_of(c, "vision_config", model_type="ernie4_5_vl_moe_vision")
    hidden, width = text.count("hidden_size"), tower.count("hidden_size") * tower.count("spatial_merge_size") ** 2
    frames = tower.count("temporal_merge_size")

    t = Table(0, prefixes=MODEL)
    t.include(table_of(text), ("model.", ""), ("model.language_model.", ""))
    include_tower(t, tower, "vision_model", "vision_tower")
    at = "@resampler_model"
    for name, into in (("spatial_linear", width), ("temporal_linear", frames * width)):
        projector(t, f"{at}.{name}", into, width, width, names=("0", "2"))
        for part in ("weight", "bias"):
            t.whole(f"{at}.{name}.3.{part}", width, why="a norm of all that the two matrices make")
    whole_projector(t, f"{at}.mlp", width, hidden)
    t.norm(f"{at}.after_norm", hidden)
    return t


def _vision(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_heads"), c.count("patch_size")
    heads, size = Heads("heads", count, count), hidden // count

    t = Table(c.count("depth"))
    t.linear("@patch_embed.proj", hidden, c.count("in_channels") * patch * patch, role="vision")
    layer = "@blocks.{layer}"
    t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv", bias=True)
    t.linear(f"{layer}.attn.proj", hidden, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("norm1", "norm2"), hidden, bias=True)
    t.norm("@ln", hidden, bias=True)
    return t


def _text(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=4)
    size, bias = c.head_dim(heads.query_heads), c.flag("use_bias", default=False)
    count, widths = c.count("moe_num_experts", "num_experts"), c.listed("moe_intermediate_size", 2)
    layers = mixed_layers(c, first_dense=1)

    t = decoder(c, tied=True)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=bias)
    with t.only(layers.sparse):
        mixed = f"{layer}.mlp"
        t.tensor(f"{mixed}.gate.weight", hidden, count, role="router")
        t.tensor(f"{mixed}.gate.weight_1", hidden, count, role="router")
        t.tensor(f"{mixed}.moe_statics.e_score_correction_bias", 2, count, role="router_bias")
        for kind, width in enumerate(Config({"width": width}).count("width") for width in widths):
            own = Units(f"expert_ffn_{kind}", width, noun="channels of every expert").each()
            for number in range(kind * count, (kind + 1) * count):
                gated_mlp(t, f"{mixed}.experts.{number}", own, hidden, bias=bias, part="expert_")
        shared = shared_channels(c.number("moe_num_shared_experts", default=2) * widths[0])
        if shared is not None:
            gated_mlp(t, f"{mixed}.shared_experts", shared, hidden, bias=bias, part="shared_")
    return t
