"""PP-FormulaNet: SAM's tower, convolutions and two matrices on what it makes, and mBART's decoder.

Source: transformers ``models/pp_formulanet/modeling_pp_formulanet.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import projector
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encdec import layer_of, side_axes
from tpshard.config import Config
from tpshard.registry import table_of
from tpshard.table import Table

FAMILY = "pp_formulanet"
MODEL_TYPES = ("pp_formulanet",)
CONVOLUTIONS = "convolutions that run once after the tower"


def table(c: Config) -> Table:
    text, vision = c.nested("text_config"), c.nested("vision_config")
    tower = Config({**vision.values, "model_type": "sam_vision_model"})
    width, vocab = text.count("d_model"), vocabulary_of(text)

    t = Table(text.count("decoder_layers"), prefixes=("model.", ""))
    t.include(table_of(tower), ("model.encoder.", ""), ("encoder.", ""), axes="vision_", or_whole=True)
    at = "@encoder.multi_modal_projector"
    wide, out = vision.count("post_conv_out_channels"), vision.count("decoder_hidden_size", default=width)
    into, middle = vision.count("post_conv_in_channels"), vision.count("post_conv_mid_channels")
    t.whole(f"{at}.conv1.weight", middle, into, 3, 3, why=CONVOLUTIONS)
    t.whole(f"{at}.conv2.weight", wide, middle, 3, 3, why=CONVOLUTIONS)
    projector(t, at, wide, wide, out)
    layer_of(t, "@decoder.layers.{layer}", side_axes(text, "decoder", width), width, cross=out)
    t.embedding("@decoder.embed_tokens", vocab, width)
    t.embedding("@decoder.embed_positions", text.count("max_position_embeddings") + 2, width, role="position")
    t.norm("@decoder.layernorm_embedding", width, bias=True)
    t.norm("@decoder.layer_norm", width, bias=True)
    tied = text.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, width, tied_to="@decoder.embed_tokens.weight" if tied else None)
    return t
