"""CLIP, SigLIP and their like: a text encoder and a vision tower, each with a matrix to a space that they share.

Chinese CLIP's text encoder is BERT.
The vision tower's table is that of its own model type; more ranks than it has heads hold it whole.
Source: transformers ``models/{chinese_clip,clip,siglip,siglip2,owlvit}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import MODEL, include_tower, whole_projector
from tpshard.blocks.dense import attention, channels_of, mlp, norms, vocabulary_of
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "clip"
PARTS = {  # the model types of the text encoder and the tower where the config does not say
    "chinese_clip": ("bert", "chinese_clip_vision_model"),
    "clip": ("clip_text_model", "clip_vision_model"),
    "siglip": ("siglip_text_model", "siglip_vision_model"),
    "siglip2": ("siglip2_text_model", "siglip2_vision_model"),
    "owlvit": ("owlvit_text_model", "owlvit_vision_model"),
}
_TEXT = {"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
         "num_attention_heads": 8, "max_position_embeddings": 77}  # fmt: skip
_SIGLIP = {**_TEXT, "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
           "max_position_embeddings": 64}  # fmt: skip
USUAL = {
    "clip_text_model": _TEXT,
    "owlvit_text_model": {**_TEXT, "max_position_embeddings": 16},
    "siglip_text_model": _SIGLIP,
    "siglip2_text_model": _SIGLIP,
}
MODEL_TYPES = (*PARTS, *USUAL)
SCALE = "one number for all pairs of texts and images"


def table(c: Config) -> Table:
    return _both(c) if c.model_type in PARTS else _text(c)


def _both(c: Config) -> Table:
    language, vision = PARTS[c.model_type]
    tower = part_of(c, "vision_config", model_type=vision)
    text = _bert(c) if language == "bert" else part_of(c, "text_config", model_type=language)
    sig = c.model_type in ("siglip", "siglip2")

    t = Table(0, prefixes=MODEL)
    places = [f"{outer}{inner}text_model." for outer in MODEL for inner in ("", "text_model.")]
    t.include(table_of(text), *[(place, place) for place in places], axes="text_")
    include_tower(t, tower, "vision_model")
    if sig:
        for scale in ("logit_scale", "logit_bias"):
            t.whole(f"@{scale}", 1, why=SCALE)
        return t
    width = c.count("projection_dim", default=512)
    whole_projector(t, "@text_projection", text.count("hidden_size"), width, bias=False)
    whole_projector(t, "@visual_projection", tower.count("hidden_size"), width, bias=False)
    t.whole("@logit_scale", why=SCALE)
    return t


def _bert(c: Config) -> Config:
    """A text encoder with BERT's tensors under a model type of its own."""
    usual = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2}  # fmt: skip
    return Config({**c.nested("text_config", **usual).values, "model_type": "bert"})


def _text(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", count, count), hidden // count

    t = Table(c.count("num_hidden_layers"), prefixes=("text_model.", ""))
    t.embedding("@embeddings.token_embedding", vocabulary_of(c), hidden)
    t.embedding("@embeddings.position_embedding", c.count("max_position_embeddings"), hidden, role="position")
    t.tensor("@embeddings.position_ids", 1, None, role="buffer", optional=True)  # files before 2024
    layer = "@encoder.layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )  # fmt: skip
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("layer_norm1", "layer_norm2"), hidden, bias=True)
    t.norm("@final_layer_norm", hidden, bias=True)
    if c.model_type.startswith("siglip"):
        whole_projector(t, "@head", hidden, c.count("projection_size", default=hidden))
    return t
