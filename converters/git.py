"""GIT: BERT's layers as a causal decoder that sees an image's patches first, through a CLIP tower.

Source: transformers ``models/git/modeling_git.py``; arXiv 2205.14100.
"""

from __future__ import annotations

from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of
from tpshard.config import Config
from tpshard.registry import table_of
from tpshard.table import Table

FAMILY = "git"
MODEL_TYPES = ("git",)
_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
           "num_channels": 3, "image_size": 224, "patch_size": 16}  # fmt: skip


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    vision = c.with_usual(vision_config=_VISION).nested("vision_config", **_VISION)
    width = vision.count("hidden_size")

    t = Table(c.count("num_hidden_layers"), prefixes=("git.", ""))
    embeddings(t, c.with_usual(max_position_embeddings=1024), vocab, e.hidden, types=False)
    encoder_layer(t, e)
    places = [f"{outer}image_encoder{inner}." for outer in ("git.", "") for inner in (".vision_model", "")]
    tower = Config({**vision.values, "model_type": "clip_vision_model"})
    t.include(table_of(tower), *((place, place) for place in places), axes="vision_", or_whole=True)
    t.linear("@visual_projection.visual_projection.0", e.hidden, width, role="vision", bias=True)
    t.norm("@visual_projection.visual_projection.1", e.hidden, bias=True)
    for frame in range(c.number("num_image_with_embedding")):
        t.tensor(f"@img_temporal_embedding.{frame}", 1, 1, width, role="vision")
    tied = c.flag("tie_word_embeddings", default=False)
    with t.stack(optional=True):
        t.tensor("output.weight", vocab, e.hidden, role="head", optional=tied)
        t.tensor("output.bias", vocab, role="head_bias")
    if tied:
        t.tie("output.weight", "@embeddings.word_embeddings.weight")
    return t
