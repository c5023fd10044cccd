"""ModernVBERT and UltraVBERT: ModernBERT's or UltraBERT's layers over words and a SigLIP tower's patches.

Source: transformers ``models/{modernvbert,ultravbert}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.composite import include_tower
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import task_heads
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "modernvbert"
MODEL_TYPES = ("modernvbert", "ultravbert")


def table(c: Config) -> Table:
    ultra = c.model_type == "ultravbert"
    text = part_of(c, "text_config", model_type="ultrabert" if ultra else "modernbert")
    text = Config({**text.values, "tie_word_embeddings": False})  # the head is the composite's own
    tower = part_of(c, "vision_config", model_type="siglip_vision_model")
    hidden, vocab = text.count("hidden_size"), vocabulary_of(text)
    factor = c.count("pixel_shuffle_factor", default=4)

    t = Table(0, prefixes=("model.", ""))
    t.include(table_of(text), "model.text_model.", "text_model.")
    include_tower(t, tower, "vision_model")
    t.linear("@connector.modality_projection", hidden, tower.count("hidden_size") * factor**2, role="vision")
    if ultra:
        t.norm("@connector.norm", hidden)
    with t.stack(optional=True):
        if ultra:
            width = Units("projection_head", text.count("prediction_head_size", default=768), or_whole=True).each()
            t.linear("head.linear1", width, hidden, role="up")
            t.linear("head.linear2", hidden, width, role="down")
            t.linear("head.decoder", vocab, hidden, role="head")
        else:
            bias = c.flag("classifier_bias", default=False)
            t.linear("projection_head.dense", hidden, hidden, role="head_projection", bias=bias)
            t.norm("projection_head.norm", hidden, bias=text.flag("norm_bias", default=False))
            t.linear("lm_head", vocab, hidden, role="head", bias=text.flag("decoder_bias", default=True))
    task_heads(t, hidden)
    return t
