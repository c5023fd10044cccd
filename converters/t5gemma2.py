"""T5Gemma 2: Gemma 3's layers as encoder and decoder, with a SigLIP tower in front of the encoder.

The decoder's attention reads its own tokens and the encoder's by one set of matrices. One embedding serves both.
Source: transformers ``models/t5gemma2/modeling_t5gemma2.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded, Units
from tpshard.blocks.composite import include_tower, input_norm
from tpshard.blocks.dense import attention, gated_mlp, heads_of, norms
from tpshard.blocks.encdec import is_bare, lacks
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "t5gemma2"
USUAL = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}  # fmt: skip
MODEL_TYPES = ("t5gemma2", "t5gemma2_encoder")
NORMS = [f"{when}_{what}_layernorm" for what in ("self_attn", "feedforward") for when in ("pre", "post")]


def table(c: Config) -> Table:
    if c.model_type == "t5gemma2_encoder":
        t = Table(0)
        t.include(_encoder(c), ("", ""))
        return t
    encoder, decoder = c.nested("encoder"), c.nested("decoder", **USUAL)
    hidden, vocab = decoder.count("hidden_size"), Padded("vocab", decoder.count("vocab_size")).each()

    t = Table(0, prefixes=("model.", ""))
    t.include(_encoder(encoder, c), ("model.encoder.", "model.encoder."), ("encoder.", "encoder."))
    prefixes = ("model.decoder.", "decoder.")
    t.include(_layers(decoder, "decoder_"), *prefixes, optional=lacks(c, "decoder"))
    tied = c.flag("tie_word_embeddings", default=True)
    heads = ("lm_head.out_proj.weight",) if tied else ()
    t.shared("@encoder.embed_tokens.weight", "@decoder.embed_tokens.weight", heads=heads, vocab=vocab, width=hidden)
    t.tensor("@decoder.embed_tokens.eoi_embedding", hidden, role="whole", note="whole: one vector", optional=True)
    if not tied:
        t.tensor("lm_head.out_proj.weight", vocab, hidden, role="head", optional=is_bare(c))
    return t


def _encoder(c: Config, around: Config | None = None) -> Table:
    """The layers, the tower, and the matrix between; inside the whole model the embedding is said outside."""
    text = c.nested("text_config", **USUAL)
    tower = part_of(c, "vision_config", model_type="siglip_vision_model")
    hidden, width = text.count("hidden_size"), tower.count("hidden_size")

    t = Table(0)
    t.include(_layers(text, ""), ("", ""))
    if around is None:
        t.embedding("@embed_tokens", Padded("vocab", text.count("vocab_size")).each(), hidden)
    t.whole("@embed_tokens.eoi_embedding", hidden, why="one vector for the end of an image")
    t.include(_tower(tower), ("", ""))
    at = "@multi_modal_projector"
    t.whole(f"{at}.mm_input_projection_weight", width, hidden,
            why="a projector of one matrix: a cut would need a gather of all it makes")  # fmt: skip
    input_norm(t, f"{at}.mm_soft_emb_norm", width, bias=False)
    return t


def _tower(tower: Config) -> Table:
    t = Table(0)
    include_tower(t, tower, "vision_tower")
    return t


def _layers(c: Config, axes: str) -> Table:
    hidden, size, bias = c.count("hidden_size"), c.count("head_dim"), c.flag("attention_bias", default=False)
    heads = heads_of(c).renamed(f"{axes}heads", False)
    ffn = Units(f"{axes}ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    layer = "@layers.{layer}"
    t = Table(c.count("num_hidden_layers"))
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    gated_mlp(t, f"{layer}.mlp", ffn, hidden)
    norms(t, layer, NORMS, hidden)
    t.norm("@norm", hidden)
    return t
