"""Qwen2-Audio and Voxtral: Whisper's encoder beside a language model, and one matrix or two between them.

Source: transformers ``models/qwen2_audio/modeling_qwen2_audio.py``, ``models/voxtral/modeling_voxtral.py``.
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
    "voxtral_encoder": _AUDIO,
}  # fmt: skip
MODEL_TYPES = ("qwen2_audio", "voxtral", *USUAL)


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return whisper_encoder(c)
    qwen = c.model_type == "qwen2_audio"
    text = language_config(c, "text_config", model_type="qwen2" if qwen else "llama")
    tower = part_of(c, "audio_config", model_type="qwen2_audio_encoder" if qwen else "voxtral_encoder")
    hidden = text.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "audio_tower", axes="audio_")
    if qwen:
        whole_projector(t, "@multi_modal_projector.linear", tower.count("d_model", "hidden_size"), hidden)
    else:  # as many frames side by side as the encoder's feed-forward is wider than the encoder
        projector(t, "@multi_modal_projector", tower.count("intermediate_size"), hidden, hidden, bias=False)
    return t
