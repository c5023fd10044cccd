"""BLIP, and the vision tower that it shares with BLIP-2 and InstructBLIP: queries, keys and values in one matrix.

The text model is BERT's, with attention to the image in every layer where it is a decoder. The class of the model says
which of text encoder and decoder a checkpoint holds.
Source: transformers ``models/{blip,blip_2,instructblip,instructblipvideo}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import include_tower, whole_projector
from tpshard.blocks.dense import attention, channels_of, mlp, norms, vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, layer_norms, masked_head, pooler
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "blip"
_BLIP_2 = {"hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 39, "num_attention_heads": 16,
           "image_size": 224, "patch_size": 14}  # fmt: skip
USUAL = {
    "blip_text_model": {"vocab_size": 30524, "hidden_size": 768, "encoder_hidden_size": 768, "intermediate_size": 3072,
                        "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 512},
    "blip_vision_model": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                          "num_attention_heads": 12, "image_size": 384, "patch_size": 16},
    "blip_2_vision_model": _BLIP_2,
    "instructblip_vision_model": _BLIP_2,
    "instructblipvideo_vision_model": _BLIP_2,
}  # fmt: skip
MODEL_TYPES = ("blip", *USUAL)
TEXTS = {  # what each class has of text models
    "BlipModel": ("text_model",),
    "BlipForImageTextRetrieval": ("text_encoder",),
    "BlipForQuestionAnswering": ("text_encoder", "text_decoder"),
}
ONE_NUMBER = "one number for all pairs of texts and images"


def table(c: Config) -> Table:
    if c.model_type != "blip":
        return _text(c) if c.model_type == "blip_text_model" else _tower(c)
    tower = part_of(c, "vision_config", model_type="blip_vision_model")
    width = tower.count("hidden_size")
    text = part_of(c, "text_config", model_type="blip_text_model")
    text = Config({**text.values, "encoder_hidden_size": width})  # whatever the part says
    hidden, kind = text.count("hidden_size"), (c.get("architectures") or [""])[0]

    t = Table(0)
    include_tower(t, tower, "vision_model")
    for name in TEXTS.get(kind, ("text_decoder",)):
        inner = "bert." if name == "text_decoder" else ""
        t.include(table_of(text), (f"{name}.{inner}", f"{name}."), axes="text_")
    if kind == "BlipModel":
        shared = c.count("projection_dim", default=512)
        whole_projector(t, "text_projection", hidden, shared, bias=False)
        whole_projector(t, "visual_projection", width, shared, bias=False)
        t.whole("logit_scale", why=ONE_NUMBER)
    if kind == "BlipForImageTextRetrieval":
        shared = c.count("image_text_hidden_size", default=256)
        whole_projector(t, "text_proj", hidden, shared)
        whole_projector(t, "vision_proj", width, shared)
        t.linear("itm_head", 2, hidden, role="pooler", bias=True)
    return t


def _text(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)

    t = Table(c.count("num_hidden_layers"), prefixes=("bert.", ""))
    embeddings(t, c, vocab, e.hidden, types=False)
    layer = "@encoder.layer.{layer}"
    encoder_layer(t, e, layer)
    if c.flag("is_decoder", default=True):
        attention(
            t, f"{layer}.crossattention", e.q, e.kv, e.hidden, bias=True, out_bias=True,
            names=("self.query", "self.key", "self.value", "output.dense"), kv_from=c.count("encoder_hidden_size"),
        )  # fmt: skip
        layer_norms(t, [f"{layer}.crossattention.output.LayerNorm"], e.hidden)
    pooler(t, e.hidden)
    tied = "@embeddings.word_embeddings.weight" if c.flag("tie_word_embeddings", default=True) else None
    masked_head(t, e.hidden, e.hidden, vocab, tied_to=tied)
    return t


def _tower(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    heads, size, layer = Heads("heads", count, count), c.head_dim(count), "@encoder.layers.{layer}"
    places = (c.count("image_size") // patch) ** 2 + 1

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@embeddings.class_embedding", 1, 1, hidden, role="vision")
    t.tensor("@embeddings.patch_embedding.weight", hidden, 3, patch, patch, role="vision")
    t.tensor("@embeddings.patch_embedding.bias", hidden, role="vision_bias")
    t.tensor("@embeddings.position_embedding", 1, places, hidden, role="position")
    qkv, bias = heads.query(size) + heads.kv(size) * 2, c.flag("qkv_bias", default=True)
    t.linear(f"{layer}.self_attn.qkv", qkv, hidden, role="qkv", bias=bias)
    t.linear(f"{layer}.self_attn.projection", hidden, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("layer_norm1", "layer_norm2"), hidden, bias=True)
    t.norm("@post_layernorm", hidden, bias=True)
    return t
