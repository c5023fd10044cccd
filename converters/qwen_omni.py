"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: a language model that sees and hears, and their audio encoders.

The encoders are Whisper's layers behind convolutions. Beside a talker the thinker's names start with ``thinker.``.
Qwen3-ASR hears alone, and its matrices behind the encoder are the model's.
Source: transformers ``models/{qwen2_5_omni,qwen3_omni_moe,qwen3_asr}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import (
    MODEL,
    include_language,
    include_tower,
    input_norm,
    language_config,
    projector,
    projector_channels,
    whole_projector,
)
from tpshard.blocks.dense import mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "qwen_omni"
PARTS = {  # the model types of the language model, the tower and the audio encoder
    "qwen2_5_omni_thinker": ("qwen2_5_omni_text", "qwen2_5_omni_vision_encoder", "qwen2_5_omni_audio_encoder"),
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe_text", "qwen3_omni_moe_vision_encoder", "qwen3_omni_moe_audio_encoder"),
}
_AUDIO = {"num_mel_bins": 128, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
          "d_model": 1280, "output_dim": 3584, "downsample_hidden_size": 480}  # fmt: skip
_ASR = {**_AUDIO, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "d_model": 1024}
USUAL = {"qwen2_5_omni_audio_encoder": _AUDIO, "qwen3_asr_encoder": _ASR, "qwen3_omni_moe_audio_encoder": _AUDIO}
MODEL_TYPES = (*PARTS, "qwen3_asr", *USUAL)


def table(c: Config) -> Table:
    if c.model_type == "qwen3_asr":
        return _recognizer(c)
    return _thinker(c) if c.model_type in PARTS else _audio(c)


def _recognizer(c: Config) -> Table:
    tower = part_of(c, "audio_config", model_type="qwen3_asr_encoder")
    width = tower.count("d_model")
    t = Table(0, prefixes=MODEL)
    include_language(t, language_config(c, "text_config", model_type="qwen3", tied=True))
    include_tower(t, tower, "audio_tower", axes="audio_")
    projector(t, "@multi_modal_projector", width, width, tower.count("output_dim"))
    return t


def _thinker(c: Config) -> Table:
    language, vision, audio = PARTS[c.model_type]
    t = Table(0, prefixes=MODEL)
    text = language_config(c, "text_config", model_type=language)
    t.include(table_of(text), ("model.", ""), ("thinker.model.", "thinker."), ("model.language_model.", ""))
    include_tower(t, part_of(c, "vision_config", model_type=vision), "visual", "thinker.visual")
    sound = part_of(c, "audio_config", model_type=audio)
    include_tower(t, sound, "audio_tower", "thinker.audio_tower", axes="audio_")
    return t


def _audio(c: Config) -> Table:
    hidden, count, third = c.count("d_model"), c.count("encoder_attention_heads"), "qwen3" in c.model_type
    heads, size, out = Heads("heads", count, count), hidden // count, c.count("output_dim")
    ffn = Units("ffn", c.count("encoder_ffn_dim"), noun="feed-forward channels").each()

    t = Table(c.count("encoder_layers"))
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", heads.query(size), hidden, role="q", bias=True)
    t.linear(f"{layer}.self_attn.k_proj", heads.kv(size), hidden, role="k", bias=third)
    t.linear(f"{layer}.self_attn.v_proj", heads.kv(size), hidden, role="v", bias=True)
    t.linear(f"{layer}.self_attn.out_proj", hidden, heads.query(size), role="o", bias=True)
    mlp(t, layer, ffn, hidden)
    norms(t, layer, ("self_attn_layer_norm", "final_layer_norm"), hidden, bias=True)
    input_norm(t, "@ln_post", hidden)
    if third:
        width, mels = c.count("downsample_hidden_size"), c.count("num_mel_bins")
        for number, into in ((1, 1), (2, width), (3, width)):
            t.tensor(f"@conv2d{number}.weight", width, into, 3, 3, role="vision")
            t.tensor(f"@conv2d{number}.bias", width, role="vision_bias")
        t.linear("@conv_out", hidden, width * -(-mels // 8), role="vision")
        if c.model_type != "qwen3_asr_encoder":
            channels = projector_channels(hidden)
            t.linear("@proj1", channels, hidden, role="projector_in", bias=True)
            t.linear("@proj2", out, channels, role="projector_out", bias=True)
    else:
        for number, into in ((1, c.count("num_mel_bins")), (2, hidden)):
            t.tensor(f"@conv{number}.weight", hidden, into, 3, role="vision")
            t.tensor(f"@conv{number}.bias", hidden, role="vision_bias")
        whole_projector(t, "@proj", hidden, out)
        t.tensor("@audio_bos_eos_token.weight", 2, out, role="vision")
    return t
