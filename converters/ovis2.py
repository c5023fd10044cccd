"""Ovis 2: the tower gives every patch weights over a vocabulary of visual words, whose embeddings are summed.

What makes the weights is cut along the visual words and gathered, for a norm and a softmax over all of them follow;
the embeddings are cut along them as a text embedding is.
Source: transformers ``models/ovis2/modeling_ovis2.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config
from tpshard.blocks.dense import attention, channels_of, gated_mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import NEEDS_GATHER, Table

FAMILY = "ovis2"
MODEL_TYPES = ("ovis2", "ovis2_vision")
USUAL = {
    "ovis2_vision": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 8,
                     "num_channels": 3, "image_size": 224, "patch_size": 14, "vocab_size": 16384,
                     "num_visual_indicator_tokens": 5, "hidden_stride": 1},
}  # fmt: skip


def table(c: Config) -> Table:
    if c.model_type == "ovis2_vision":
        return _tower(c)
    text = language_config(c, "text_config", model_type="qwen2", tied=True)
    tower = part_of(c, "vision_config", model_type="ovis2_vision")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    words = Padded("visual_vocab", tower.count("vocab_size"), noun="visual words")
    t.embedding("@visual_embeddings_table", words.each(), c.count("hidden_size", default=text.count("hidden_size")))
    return t


def _tower(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size, bias = Heads("heads", count, count), c.head_dim(count), c.flag("qkv_bias", default=False)
    patch = c.count("patch_size")
    words = c.count("vocab_size") - c.count("num_visual_indicator_tokens")

    t = Table(c.count("num_hidden_layers"))
    at = "@transformer.embeddings"
    t.tensor(f"{at}.patch_embedding.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor(f"{at}.patch_embedding.bias", hidden, role="vision_bias")
    t.embedding(f"{at}.position_embedding", (c.count("image_size") // patch) ** 2, hidden, role="position")
    t.norm(f"{at}.rms_norm", hidden)
    layer = "@transformer.encoder.layers.{layer}"
    attention(
        t, f"{layer}.attention", heads.query(size), heads.kv(size), hidden,
        bias=bias, out_bias=bias, names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )  # fmt: skip
    gated_mlp(t, f"{layer}.ffn", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False))
    norms(t, layer, ("rms_norm1", "rms_norm2"), hidden)
    t.norm("@transformer.rms_norm", hidden)
    weights = Units("words", words, noun="visual words without the indicators").each()
    t.linear("@head_linear", weights, c.count("hidden_stride") ** 2 * hidden, role="gathered", note=NEEDS_GATHER)
    t.norm("@head_norm", words, bias=True)
    return t
