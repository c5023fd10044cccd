"""Mimi: a codec with a transformer behind its encoder's convolutions and one before its decoder's; and its listener.

The convolutions and codebooks stay whole. Kyutai's speech-to-text model is a language model over text and codes, each
with rows of their own in one embedding, with the codec beside it.
Source: transformers ``models/mimi/modeling_mimi.py``, ``models/kyutai_speech_to_text``.
"""

from __future__ import annotations

from tpshard.axes import Padded, Units
from tpshard.blocks.dense import attention, heads_of, mlp, norms
from tpshard.blocks.speech import WAVE
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "mimi"
MODEL_TYPES = ("kyutai_speech_to_text", "mimi")
USUAL = {"mimi": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
                  "num_key_value_heads": 8}}  # fmt: skip
SCALES = "it scales what every rank has after the sum"


def table(c: Config) -> Table:
    return _codec(c) if c.model_type == "mimi" else _listener(c)


def _codec(c: Config) -> Table:
    c = c.with_usual(**USUAL["mimi"])
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()

    t = Table(0)
    for side in ("encoder", "decoder"):
        t.whole_module(side, why=WAVE)
        with t.stack(c.count("num_hidden_layers")):
            layer = f"{side}_transformer.layers.{{layer}}"
            attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
            mlp(t, f"{layer}.mlp", ffn, hidden, bias=False)
            norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
            for scale in ("self_attn_layer_scale", "mlp_layer_scale"):
                t.whole(f"{layer}.{scale}.scale", hidden, why=SCALES)
    t.whole_module("quantizer", why="codebooks, in which every rank looks up the same")
    for module in ("downsample", "upsample"):
        t.whole_module(module, why=WAVE, optional=True)  # where the codec's rates differ
    return t


def _listener(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size, books = c.head_dim(heads.query_heads), c.count("num_codebooks", default=32)
    inner = c.count("ffn_dim") // 2
    ffn = Units("ffn", inner, noun="feed-forward channels").each()
    vocab = c.count("vocab_size")
    rows = vocab + books * c.count("codebook_vocab_size", default=2049) + 1

    t = Table(c.count("num_hidden_layers"), prefixes=("model.", ""))
    t.embedding("@embed_tokens.embed_tokens", Padded("codes", rows, noun="rows of text and codes").each(), hidden)
    layer = "@layers.{layer}"
    names = ("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear")
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, names=names)
    t.linear(f"{layer}.mlp.fc1", ffn * 2, hidden, role="gate_up")
    t.linear(f"{layer}.mlp.fc2", hidden, ffn, role="down")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    t.norm("@norm", hidden)
    with t.stack(optional=True):
        t.linear("lm_head", Padded("vocab", vocab).each(), hidden, role="head")
    codec = part_of(c, "codec_config", model_type="mimi")
    t.include(table_of(codec), ("codec_model.", "codec_model."), axes="codec_", or_whole=True, optional=True)
    return t
