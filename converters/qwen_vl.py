"""Qwen's vision language models, and others that put Qwen's towers beside a language model of their own.

The tower ends with a merger to the language model's width, so nothing else connects the two; HyperCLOVA X has one
more matrix. Qwen2-VL and Qwen2.5-VL were released with the language model's numbers beside the tower's config,
and with names without ``language_model``.
Source: transformers ``models/{qwen2_vl,qwen2_5_vl,qwen3_vl,qwen3_vl_moe,glm4v,glm46v,cohere_compass,exaone4_5}``,
``models/hyperclovax_vision_v2``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, whole_projector
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "qwen_vl"
PARTS = {  # the language model's and the tower's model types where the config does not say
    "qwen2_vl": ("qwen2_vl_text", "qwen2_vl_vision"),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "qwen3_vl": ("qwen3_vl_text", "qwen3_vl_vision"),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_vision"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_vision"),
    "qwen4_exp": ("qwen4_exp_text", "qwen4_exp_vision"),
    "glm4v": ("glm4v_text", "glm4v_vision"),
    "glm46v": ("glm4v_text", "glm4v_vision"),
    "glmga": ("glm4v_text", "glm4v_vision"),
    "glm_ocr": ("glm_ocr_text", "glm_ocr_vision"),
    "glm4v_moe": ("glm4v_moe_text", "glm4v_moe_vision"),
    "cohere_compass": ("cohere_compass_text", "cohere_compass_vision"),
    "exaone4_5": ("exaone4", "exaone4_5_vision"),
    "hyperclovax_vision_v2": ("hyperclovax", "qwen2_5_vl_vision"),
}
MODEL_TYPES = tuple(PARTS)


def table(c: Config) -> Table:
    language, vision = PARTS[c.model_type]
    hyperclovax = c.model_type == "hyperclovax_vision_v2"
    text = language_config(c, "text_config", model_type=language, tied=hyperclovax)
    released = c.nested("vision_config", model_type=vision).values
    # The towers of Qwen2-VL and Qwen2.5-VL were released with the whole model's type.
    named = {**released, "model_type": vision} if released.get("model_type") == c.model_type else released
    tower = part_of(Config({"vision_config": named}), "vision_config", model_type=vision)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_model" if hyperclovax else "visual")
    if hyperclovax:
        for at in ("@vision_projector", "@projector"):
            out = tower.count("out_hidden_size")
            with t.stack(prefixes=MODEL, optional=True):
                whole_projector(t, at, out, text.count("hidden_size"))
    return t
