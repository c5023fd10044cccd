"""LFM2-VL and LFM3-VL: LFM's language model, patches that are joined, two matrices between.

LFM2-VL has SigLIP 2's tower. LFM3-VL's own is made like the language model: convolutions over the patches of an image
in some layers, attention in others.
Source: transformers ``models/{lfm2_vl,lfm3_vl}/modeling_*.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.composite import MODEL, include_language, include_tower, input_norm, language_config, projector
from tpshard.blocks.dense import MIXTRAL, attention, channels_of, gated_mlp, heads_of, norms
from tpshard.blocks.mixers import ATTENTION, layers_of
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "lfm2_vl"
USUAL = {
    "lfm3_vl_vision": {"hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 14,
                       "num_attention_heads": 16, "num_key_value_heads": 8, "in_channels": 3, "patch_size": 16,
                       "temporal_patch_size": 2, "spatial_merge_size": 2, "conv_kernel_size": 3},
}  # fmt: skip
MODEL_TYPES = ("lfm2_vl", "lfm3_vl", *USUAL)


def table(c: Config) -> Table:
    if c.model_type == "lfm3_vl_vision":
        return _tower(c)
    third = c.model_type == "lfm3_vl"
    text = language_config(c, "text_config", model_type="lfm3" if third else "lfm2", tied=True)
    tower = part_of(c, "vision_config", model_type="lfm3_vl_vision" if third else "siglip2_vision_model")
    width = tower.count("hidden_size")
    side = tower.count("spatial_merge_size") if third else c.count("downsample_factor", default=2)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    at = "@multi_modal_projector"
    if third:  # before the patches are joined
        input_norm(t, f"{at}.layer_norm", width)
    elif c.flag("projector_use_layernorm", default=True):
        input_norm(t, f"{at}.layer_norm", width * side**2)
    channels = c.count("projector_hidden_size", default=4096 if third else 2560)
    bias = c.flag("projector_bias", default=True)
    projector(t, at, width * side**2, channels, text.count("hidden_size"), bias=bias)
    return t


def _tower(c: Config) -> Table:
    hidden, heads, kernel = c.count("hidden_size"), heads_of(c), c.count("conv_kernel_size")
    size, layer = c.head_dim(heads.query_heads), "@layers.{layer}"
    values = c.count("in_channels") * c.count("temporal_patch_size") * c.count("patch_size") ** 2

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@patchifier.weight", hidden, values, role="vision")
    t.norm("@embedding_norm", hidden)
    usual = ["conv" if number < 2 or number % 2 else "full_attention" for number in range(t.layers)]
    attentive = layers_of(c.with_usual(layer_types=usual).listed("layer_types", t.layers), *ATTENTION)
    with t.only(attentive):
        at = f"{layer}.self_attn"
        attention(
            t, at, heads.query(size), heads.kv(size), hidden, names=("q_proj", "k_proj", "v_proj", "out_proj")
        )
        norms(t, at, ("q_layernorm", "k_layernorm"), size)
    with t.only(frozenset(range(t.layers)) - attentive):
        channels = Units("conv_channels", hidden, noun="convolution channels").each()
        t.linear(f"{layer}.conv.in_proj", channels * 3, hidden, role="linear_in")
        t.tensor(f"{layer}.conv.spatial_conv.weight", channels, 1, kernel, kernel, role="linear_conv")
        t.linear(f"{layer}.conv.out_proj", hidden, channels, role="linear_out")
    gated_mlp(t, f"{layer}.feed_forward", channels_of(c), hidden, names=MIXTRAL)
    norms(t, layer, ("operator_norm", "ffn_norm"), hidden)
    return t
