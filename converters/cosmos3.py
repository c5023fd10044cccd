"""Cosmos 3: Omni is Qwen3-VL under flat names, Edge a small decoder without gates beside a SigLIP 2 tower.

The files of both call the matrices of attention as diffusers does (``to_q``, ``to_out``); older ones of Omni keep
Qwen's names for them.
Source: transformers ``models/{cosmos3_edge,cosmos3_omni}/modeling_*.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import (
    LANGUAGE,
    MODEL,
    include_respelt,
    include_tower,
    input_norm,
    language_config,
    projector,
)
from tpshard.blocks.dense import attention, channels_of, decoder, heads_of, mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "cosmos3"
USUAL = {
    "cosmos3_edge_text": {"vocab_size": 131072, "hidden_size": 2048, "intermediate_size": 9216,
                          "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                          "head_dim": 128},
    "cosmos3_edge_vision": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                            "num_attention_heads": 16, "num_channels": 3, "patch_size": 16, "num_patches": 256,
                            "spatial_merge_size": 2},
}  # fmt: skip
MODEL_TYPES = ("cosmos3_edge", "cosmos3_omni", *USUAL)
DIFFUSERS = {
    ".self_attn.q_proj.": ".self_attn.to_q.",
    ".self_attn.k_proj.": ".self_attn.to_k.",
    ".self_attn.v_proj.": ".self_attn.to_v.",
    ".self_attn.o_proj.": ".self_attn.to_out.",
    ".self_attn.q_norm.": ".self_attn.norm_q.",
    ".self_attn.k_norm.": ".self_attn.norm_k.",
}
EDGE_TOWER = {**DIFFUSERS, ".mlp.fc1.": ".mlp.up_proj.", ".mlp.fc2.": ".mlp.down_proj."}


def table(c: Config) -> Table:
    if c.model_type == "cosmos3_edge_text":
        return _edge_text(c)
    if c.model_type == "cosmos3_edge_vision":
        tower = table_of(Config({**c.values, "model_type": "siglip2_vision_model"}))
        for old, new in EDGE_TOWER.items():
            tower.rules = [rule._replace(name=rule.name.replace(old, new)) for rule in tower.rules]
        return tower
    return _edge(c) if c.model_type == "cosmos3_edge" else _omni(c)


def _omni(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="qwen3_vl_text")
    tower = part_of(c, "vision_config", model_type="qwen3_vl_vision")
    t = Table(0)
    include_respelt(t, table_of(text), DIFFUSERS, ("", ""), *LANGUAGE)
    visual = tuple((f"{outer}visual.", f"{outer}visual.") for outer in MODEL)
    t.include(table_of(tower), ("", ""), *visual, axes="vision_", or_whole=True)
    return t


def _edge(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="cosmos3_edge_text")
    tower = part_of(c, "vision_config", model_type="cosmos3_edge_vision")
    width = tower.count("hidden_size")
    t, at = Table(0, prefixes=MODEL), "@projector"
    t.include(table_of(text), ("", ""), ("model.", ""))
    include_tower(t, tower, "visual")
    input_norm(t, f"{at}.norm", width)
    joined, channels = width * tower.count("spatial_merge_size") ** 2, c.count("projector_hidden_size", default=11520)
    projector(t, at, joined, channels, text.count("hidden_size"), names=("linear_fc1", "linear_fc2"))
    return t


def _edge_text(c: Config) -> Table:
    hidden, heads, layer = c.count("hidden_size"), heads_of(c), "@layers.{layer}"
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)

    t = decoder(c, prefixes=("", "model."))
    names = ("to_q", "to_k", "to_v", "to_out")
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias, names=names
    )
    mlp(
        t, f"{layer}.mlp", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False),
        names=("up_proj", "down_proj"),
    )  # fmt: skip
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
