"""Idefics 2, 3 and SmolVLM: a SigLIP-like tower, a connector, a language model (``text_model``).

Idefics 2's connector is a gated MLP and a resampler, whose latents look at the patches; the later ones join patches
and have one matrix.
Source: transformers ``models/{idefics2,idefics3,smolvlm}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import (
    MODEL,
    include_language,
    include_tower,
    language_config,
    projector_channels,
    whole_projector,
)  # fmt: skip
from tpshard.blocks.dense import attention, gated_mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "idefics2"
MODEL_TYPES = ("idefics2", "idefics3", "smolvlm")
RESAMPLER = {"hidden_size": 4096, "resampler_depth": 3, "resampler_n_heads": 16, "resampler_head_dim": 96,
             "num_key_value_heads": 4, "resampler_n_latents": 64}  # fmt: skip


def table(c: Config) -> Table:
    second = c.model_type == "idefics2"
    text = language_config(c, "text_config", model_type="mistral" if second else "llama")
    released = c.nested("vision_config").values
    kind = f"{c.model_type}_vision"
    named = {**released, "model_type": kind} if released.get("model_type") in (None, c.model_type) else released
    tower = part_of(Config({"vision_config": named}), "vision_config", model_type=kind)
    hidden, width = text.count("hidden_size"), tower.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_model")
    at = "@connector.modality_projection"
    if second:
        channels = projector_channels(text.count("intermediate_size"))
        t.linear(f"{at}.gate_proj", channels, width, role="projector_in")
        t.linear(f"{at}.up_proj", channels, width, role="projector_in")
        t.linear(f"{at}.down_proj", hidden, channels, role="projector_out")
        _resampler(t, c.nested("perceiver_config", **RESAMPLER), hidden)
    else:
        joined = c.count("scale_factor", default=2) ** 2 * width
        whole_projector(t, f"{at}.proj", joined, hidden, bias=False)
    return t


def _resampler(t: Table, c: Config, hidden: int) -> None:
    heads = Heads("resampler_heads", c.count("resampler_n_heads"), c.count("num_key_value_heads"), or_whole=True)
    size = c.count("resampler_head_dim")
    ffn = Units("resampler_ffn", 4 * hidden, noun="feed-forward channels", or_whole=True).each()
    with t.stack(c.count("resampler_depth"), prefixes=("model.connector.perceiver_resampler.",
                                                       "connector.perceiver_resampler.")):  # fmt: skip
        t.tensor("@latents", c.count("resampler_n_latents"), hidden, role="vision")
        layer = "@layers.{layer}"
        attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden)
        gated_mlp(t, f"{layer}.mlp", ffn, hidden)
        norms(t, layer, ("input_latents_norm", "input_context_norm", "post_attention_layernorm"), hidden)
        t.norm("@norm", hidden)
