"""Voxtral Realtime: a causal encoder with Llama's layers, its frames joined, and a language model that knows the delay.

Every layer of the language model scales its feed-forward's input by what two small matrices make of the delay.
Source: transformers ``models/voxtral_realtime/modeling_voxtral_realtime.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector
from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.blocks.speech import WAVE
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "voxtral_realtime"
USUAL = {
    "voxtral_realtime_encoder": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
                                 "num_attention_heads": 32, "num_mel_bins": 128},
    "voxtral_realtime_text": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
}  # fmt: skip
MODEL_TYPES = ("voxtral_realtime", *USUAL)
DELAY = 32  # channels between the two matrices, which no config tells


def table(c: Config) -> Table:
    if c.model_type == "voxtral_realtime_text":
        return _text(c)
    if c.model_type == "voxtral_realtime_encoder":
        return _encoder(c)
    text = language_config(c, "text_config", model_type="voxtral_realtime_text", tied=True)
    tower = part_of(c, "audio_config", model_type="voxtral_realtime_encoder")
    hidden = text.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "audio_tower", axes="audio_")
    joined = c.count("downsample_factor", default=4) * tower.count("hidden_size")
    projector(t, "@multi_modal_projector", joined, hidden, hidden, bias=False)
    return t


def _text(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads)

    t = decoder(c, tied=True)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    for name, out, into in (("linear1", DELAY, hidden), ("linear2", hidden, DELAY)):
        t.whole(f"{layer}.ada_rms_norm.{name}.weight", out, into, why="what it makes of the delay scales all channels")
    return t


def _encoder(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads)
    q, kv, ffn = heads.query(size), heads.kv(size), channels_of(c)

    t = Table(c.count("num_hidden_layers"))
    t.whole_module("@embedder", why=WAVE)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q", bias=True)
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k")
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v", bias=True)
    t.linear(f"{layer}.self_attn.o_proj", hidden, q, role="o", bias=True)
    t.linear(f"{layer}.mlp.gate_proj", ffn, hidden, role="gate")
    t.linear(f"{layer}.mlp.up_proj", ffn, hidden, role="up")
    t.linear(f"{layer}.mlp.down_proj", hidden, ffn, role="down", bias=True)
    norms(t, layer, ("self_attn_layer_norm", "final_layer_norm"), hidden)
    t.norm("@norm", hidden)
    return t
