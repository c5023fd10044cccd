"""Kimi K2.5: DeepSeek-V3's language model, and a ViT whose patches a projector of two matrices joins.

Files that transformers saves call the language model's layers ``blocks``, and put one norm and one matrix elsewhere.
Source: transformers ``models/kimi_k25/modeling_kimi_k25.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tpshard.axes import Heads
from tpshard.blocks.composite import LANGUAGE, include_tower, language_config, projector
from tpshard.blocks.dense import channels_of, mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "kimi_k25"
USUAL = {
    "kimi_k25_vision": {"patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64, "num_attention_heads": 16,
                        "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304,
                        "merge_kernel_size": [2, 2]},
}  # fmt: skip
MODEL_TYPES = ("kimi_k25", *USUAL)


def table(c: Config) -> Table:
    if c.model_type == "kimi_k25_vision":
        return _tower(c)
    text = language_config(c, "text_config", model_type="deepseek_v3", tied=True)
    tower = part_of(c, "vision_config", model_type="kimi_k25_vision")
    side, across = (Config({"n": n}).count("n") for n in tower.listed("merge_kernel_size", 2))
    joined = tower.count("hidden_size") * side * across

    t = Table(0, prefixes=("model.", ""))
    language = table_of(text)
    layers = [rule for rule in language.rules if "{layer}" in rule.name]
    saved = [rule._replace(name=rule.name.replace("@layers.", "@blocks.")) for rule in layers]
    t.include(replace(language, rules=[rule for rule in language.rules if rule not in layers], stacks=[]), *LANGUAGE)
    for form in (layers, saved):
        t.include(replace(language, rules=form, tied=[], stacks=[]), *LANGUAGE, optional=True)
    t.one_stack_of(len(t.stacks) - 2, len(t.stacks) - 1)
    include_tower(t, tower, "vision_tower")
    projector(t, "mm_projector", joined, joined, text.count("hidden_size"), names=("proj.0", "proj.2"))
    for block, at in (("published norm", "mm_projector"), ("saved norm", "model.mm_projector")):
        with t.block(block):
            t.norm(f"{at}.pre_norm", c.count("projection_hidden_size", default=1152), bias=True)
    t.one_of("published norm", "saved norm")
    return t


def _tower(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    heads, size, layer = Heads("heads", count, count), c.head_dim(count), "@encoder.blocks.{layer}"

    t = Table(c.count("num_hidden_layers"))
    for block, at in (("published patches", "@patch_embed"), ("saved patches", "@encoder.patch_embed")):
        with t.block(block):
            t.tensor(f"{at}.proj.weight", hidden, 3, patch, patch, role="vision")
            t.tensor(f"{at}.proj.bias", hidden, role="vision_bias")
    t.one_of("published patches", "saved patches")
    places = c.count("pos_emb_height"), c.count("pos_emb_width")
    t.tensor("@patch_embed.pos_emb.weight", *places, hidden, role="position")
    t.linear(f"{layer}.wqkv", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv", bias=True)
    t.linear(f"{layer}.wo", hidden, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden, names=("fc0", "fc1"))
    norms(t, layer, ("norm0", "norm1"), hidden, bias=True)
    t.norm("@encoder.final_layernorm", hidden, bias=True)
    return t
