"""AltCLIP: CLIP's tower beside XLM-RoBERTa's layers, which a norm and a matrix bring to the width of a text encoder.

The tower's layers are ``layers`` in released files and ``layer`` in those that transformers 5 saves.
Source: transformers ``models/altclip/modeling_altclip.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import include_respelt, whole_projector
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "altclip"
USUAL = {
    "altclip_text_model": {"vocab_size": 250002, "hidden_size": 1024, "intermediate_size": 4096,
                           "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 514,
                           "type_vocab_size": 1, "project_dim": 768},
}  # fmt: skip
MODEL_TYPES = ("altclip", "altclip_text_model")


def table(c: Config) -> Table:
    if c.model_type == "altclip_text_model":
        return _text(c)
    text = part_of(c, "text_config", model_type="altclip_text_model")
    tower = part_of(c, "vision_config", model_type="altclip_vision_model")
    shared = c.count("projection_dim", default=768)

    t = Table(0)
    t.include(table_of(text), ("text_model.roberta.", "text_model."), axes="text_")
    places = (("vision_model.", "vision_model."),)
    include_respelt(t, table_of(tower), {".layers.": ".layer."}, *places, axes="vision_", or_whole=True)
    whole_projector(t, "text_projection", text.count("project_dim"), shared, bias=False)
    whole_projector(t, "visual_projection", tower.count("hidden_size"), shared, bias=False)
    t.whole("logit_scale", why="one number for all pairs of texts and images")
    return t


def _text(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)

    t = Table(c.count("num_hidden_layers"), prefixes=("roberta.", ""))
    embeddings(t, c, vocab, e.hidden)
    encoder_layer(t, e)
    t.norm("pre_LN", e.hidden, bias=True)
    whole_projector(t, "transformation", e.hidden, c.count("project_dim"))
    return t
