"""GLM-ASR: Whisper's convolutions before Llama-like layers with a bias everywhere but on keys, and a language model.

As many frames as the encoder's feed-forward is wider than it lie side by side before the projector.
Source: transformers ``models/glmasr/modeling_glmasr.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector
from tpshard.blocks.dense import channels_of, heads_of, mlp, norms
from tpshard.blocks.speech import wave_convolutions
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "glmasr"
USUAL = {"glmasr_encoder": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
                            "num_attention_heads": 20, "num_mel_bins": 128}}  # fmt: skip
MODEL_TYPES = ("glmasr", *USUAL)


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return _encoder(c)
    text = language_config(c, "text_config", model_type="llama", tied=True)
    tower = part_of(c, "audio_config", model_type="glmasr_encoder")
    hidden = text.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "audio_tower", axes="audio_")
    projector(t, "@multi_modal_projector", tower.count("intermediate_size"), 2 * hidden, hidden)
    return t


def _encoder(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads)

    t = Table(c.count("num_hidden_layers"))
    wave_convolutions(t, c.count("num_mel_bins"), hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", heads.query(size), hidden, role="q", bias=True)
    t.linear(f"{layer}.self_attn.k_proj", heads.kv(size), hidden, role="k")
    t.linear(f"{layer}.self_attn.v_proj", heads.kv(size), hidden, role="v", bias=True)
    t.linear(f"{layer}.self_attn.o_proj", hidden, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
    t.norm("@norm", hidden, bias=True)
    return t
