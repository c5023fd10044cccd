"""SpeechT5: an encoder and a decoder with heads for text and speech before and behind both, which stay whole.

Distances between positions go through one table that all heads of the encoder share.
Source: transformers ``models/speecht5/modeling_speecht5.py``.
"""

from __future__ import annotations

from tpshard.axes import Dim, Padded
from tpshard.blocks.dense import attention, mlp
from tpshard.blocks.encdec import OUT, side_axes
from tpshard.blocks.speech import DENSE
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "speecht5"
MODEL_TYPES = ("speecht5",)
PREFIXES = ("speecht5.", "")
NETS = "what turns speech or text into the encoder's or decoder's width, or back"


def table(c: Config) -> Table:
    hidden = c.count("hidden_size", default=768)
    c = c.with_usual(encoder_ffn_dim=3072, decoder_ffn_dim=3072, encoder_attention_heads=12, decoder_attention_heads=12)
    vocab = Padded("vocab", c.count("vocab_size", default=81)).each()

    t = Table(0, prefixes=PREFIXES)
    for side, layers in (("encoder", 12), ("decoder", 6)):
        with t.stack(c.count(f"{side}_layers", default=layers), prefixes=PREFIXES):
            _layer(t, c, side, hidden)
    _texts(t, c, vocab, hidden)
    for net in ("encoder.prenet", "decoder.prenet"):
        t.whole_module(f"@{net}", why=NETS, optional=True)
    t.whole_module("speech_decoder_postnet", why=NETS, optional=True)
    return t


def _layer(t: Table, c: Config, side: str, hidden: int) -> None:
    heads, size, ffn = side_axes(c, side, hidden)
    wrapped = f"@{side}.wrapped_{side}"
    layer = f"{wrapped}.layers.{{layer}}"
    kinds = ("attention",) if side == "encoder" else ("self_attn", "encoder_attn")
    for at in kinds:
        attention(t, f"{layer}.{at}", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True, names=OUT)
    mlp(t, f"{layer}.feed_forward", ffn, hidden, names=DENSE)
    own = ("layer_norm",) if side == "encoder" else ("self_attn_layer_norm", "encoder_attn_layer_norm")
    for norm in (*own, "final_layer_norm"):
        t.norm(f"{layer}.{norm}", hidden, bias=True)
    if side == "encoder":
        t.norm(f"{wrapped}.layer_norm", hidden, bias=True)
        rows = 2 * c.count("encoder_max_relative_position", default=160)
        t.whole(f"{wrapped}.embed_positions.pe_k.weight", rows, size, why="distances, which all heads share")


def _texts(t: Table, c: Config, vocab: Dim, hidden: int) -> None:
    """The embeddings of models that read or write text, and the head of the latter, tied to the decoder's."""
    head, tied = "text_decoder_postnet.lm_head", c.flag("tie_word_embeddings", default=True)
    with t.stack(prefixes=PREFIXES, optional=True):
        t.embedding("@encoder.prenet.embed_tokens", vocab, hidden)
    with t.stack(prefixes=PREFIXES, optional=True):
        heads = (f"{head}.weight",) if tied else ()
        t.shared("@decoder.prenet.embed_tokens.weight", heads=heads, vocab=vocab, width=hidden)
    if not tied:
        with t.stack(optional=True):
            t.linear(head, vocab, hidden, role="head")
