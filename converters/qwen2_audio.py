"""Qwen2-Audio, Voxtral and Audio Flamingo 3: Whisper's encoder beside a language model, one matrix or two between.

Source: transformers ``models/{qwen2_audio,voxtral,audioflamingo3,musicflamingo}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector, whole_projector
from tpshard.blocks.speech import whisper_encoder
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "qwen2_audio"
_AUDIO = {"num_mel_bins": 128, "max_source_positions": 1500, "hidden_size": 1280, "intermediate_size": 5120,
          "num_hidden_layers": 32, "num_attention_heads": 20}  # fmt: skip
USUAL = {
    "qwen2_audio_encoder": {"num_mel_bins": 128, "max_source_positions": 1500, "d_model": 1280, "encoder_ffn_dim": 5120,
                            "encoder_layers": 32, "encoder_attention_heads": 20},
    "audioflamingo3_encoder": _AUDIO,
    "voxtral_encoder": _AUDIO,
}  # fmt: skip
PARTS = {  # the model types of the language model and of the encoder where the config does not say
    "audioflamingo3": ("qwen2", "audioflamingo3_encoder"),
    "musicflamingo": ("qwen2", "audioflamingo3_encoder"),
    "qwen2_audio": ("qwen2", "qwen2_audio_encoder"),
    "voxtral": ("llama", "voxtral_encoder"),
}
MODEL_TYPES = (*PARTS, *USUAL)


def table(c: Config) -> Table:
    kind = c.model_type
    if kind in USUAL:
        return whisper_encoder(c)
    language, encoder = PARTS[kind]
    text = language_config(c, "text_config", model_type=language)
    tower = part_of(c, "audio_config", model_type=encoder)
    hidden, width = text.count("hidden_size"), tower.count("d_model", "hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "audio_tower", axes="audio_")
    at = "@multi_modal_projector"
    if kind == "qwen2_audio":
        whole_projector(t, f"{at}.linear", width, hidden)
    elif kind == "voxtral":  # as many frames side by side as the encoder's feed-forward is wider than the encoder
        projector(t, at, tower.count("intermediate_size"), hidden, hidden, bias=False)
    else:
        projector(t, at, width, hidden, hidden, bias=c.flag("projector_bias", default=True))
    return t
