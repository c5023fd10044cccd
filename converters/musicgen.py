"""MusicGen's decoder: BART's without biases, with an embedding and a head for every codebook.

The embeddings of a token's codebooks are added up; each is cut along its own vocabulary, which has one more row
(the mask) than a head. Source: transformers ``models/musicgen/modeling_musicgen.py``,
``models/musicgen_melody/modeling_musicgen_melody.py`` (which has no cross attention).
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import mlp
from tpshard.blocks.encdec import attend, head_size
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "musicgen_decoder"
MODEL_TYPES = ("musicgen_decoder", "musicgen_melody_decoder")


def table(c: Config) -> Table:
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
