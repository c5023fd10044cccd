"""MusicGen's decoder: BART's without biases, with an embedding and a head for every codebook.

The embeddings of a token's codebooks are added up; each is cut along its own vocabulary, which has one more row
(the mask) than a head. MusicGen as a whole has an encoder of text and a codec beside it.
Source: transformers ``models/musicgen/modeling_musicgen.py``, ``models/musicgen_melody/modeling_musicgen_melody.py``
(which has no cross attention).
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import mlp
from tpshard.blocks.encdec import attend, head_size
from tpshard.blocks.speech import WAVE
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "musicgen_decoder"
WHOLE = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}  # and its decoder
MODEL_TYPES = (*WHOLE, *WHOLE.values())


def table(c: Config) -> Table:
    if c.model_type not in WHOLE:
        return _decoder(c)
    t = Table(0)
    t.include(_decoder(part_of(c, "decoder", model_type=WHOLE[c.model_type])), ("decoder.model.decoder.", "decoder."))
    text = part_of(c, "text_encoder", model_type="t5")
    text = Config({**text.values, "architectures": ["T5EncoderModel"]})
    t.include(table_of(text), ("text_encoder.", "text_encoder."), axes="text_", or_whole=True)
    t.whole_module("audio_encoder", why=WAVE)
    for name in ("enc_to_dec_proj", "audio_enc_to_dec_proj"):
        t.whole_module(name, why="from the width of what is read to the decoder's", optional=True)
    return t


def _decoder(c: Config) -> Table:
    width, books, query = c.count("hidden_size"), c.count("num_codebooks"), c.count("num_attention_heads")
    heads, size = Heads("heads", query, query), head_size(width, query)
    ffn = Units("ffn", c.count("ffn_dim"), noun="feed-forward channels").each()
    codes = Padded("vocab", c.count("vocab_size"), noun="codes of every book").each()
    with_mask = Padded("masked_vocab", c.count("vocab_size") + 1, noun="codes of every book and the mask").each()
    t = Table(c.count("num_hidden_layers"), prefixes=("model.decoder.", "decoder."))
    for book in range(books):
        t.embedding(f"@embed_tokens.{book}", with_mask, width)
        t.head(f"lm_heads.{book}", codes, width, tied_to=None)
    layer = "@layers.{layer}"
    attend(t, f"{layer}.self_attn", heads, size, width, bias=False)
    if c.model_type == "musicgen_decoder":
        attend(t, f"{layer}.encoder_attn", heads, size, width, bias=False)
    mlp(t, layer, ffn, width, bias=False)
    t.norm(f"{layer}.final_layer_norm", width, bias=True)
    t.norm("@layer_norm", width, bias=True)
    t.tensor("@embed_positions.weights", None, width, role="buffer", optional=True)  # sinusoids of older files
    return t
