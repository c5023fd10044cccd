"""Nemotron Transcribe: a Nemotron-H that hears by two encoders, one of speech and one of who speaks; NeMo's names.

The encoders are layers of one kind, with queries, keys and values in one matrix. A small third of them says when a
word was spoken. Source: transformers ``models/nemotron3_5_transcribe``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.composite import include_respelt, whole_projector
from tpshard.blocks.dense import mlp, norms
from tpshard.blocks.speech import AFTER
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "nemo_speechlm"
MODEL_TYPES = ("nemo_speechlm",)
SPEECH = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 10}
SPEAKERS = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 31, "num_attention_heads": 8}
WORDS = {"hidden_size": 1280, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 16,
         "vocab_size": 23863}  # fmt: skip
LANGUAGE = {"@embeddings": "@embed_tokens", "@norm_f": "@norm", "mixer.A_log": "mixer._fp32_params.A_log",
            "mixer.D": "mixer._fp32_params.D", "mixer.dt_bias": "mixer._fp32_params.dt_bias"}  # fmt: skip
FRAMES = "frames of mel bins side by side, before the first layer"


def table(c: Config) -> Table:
    text = part_of(c, "text_config", model_type="nemotron_h")
    sound = c.with_usual(audio_config={}).nested("audio_config", asr_config={}, diarization_config={})
    speech = sound.nested("asr_config", **SPEECH)
    speakers = sound.nested("diarization_config", audio_config={}).nested("audio_config", **SPEAKERS)
    words = c.with_usual(word_timestamp_config={}).nested("word_timestamp_config", **WORDS)

    t = Table(0)
    include_respelt(t, table_of(text), LANGUAGE, ("llm.model.", "llm."))
    at = "perception.encoder"
    t.include(_encoder(speech, normed=True, first=True), f"{at}.asr_encoder.", axes="speech_", or_whole=True)
    t.include(_encoder(speakers, normed=False, first=True), f"{at}.diarization_model.encoder.", axes="speakers_",
              or_whole=True)  # fmt: skip
    t.whole_module(f"{at}.diarization_model.sortformer_modules", why=AFTER)
    for norm in ("asr_norm", "diar_norm"):
        t.norm(f"{at}.{norm}", None, bias=True)
    whole_projector(t, "perception.proj", speech.count("hidden_size"), text.count("hidden_size"))
    below = "ctc_timestamp.decoder"
    t.include(_encoder(words, normed=True, first=False), f"{below}.transformer.", axes="words_", or_whole=True)
    t.whole_module(f"{below}.upsample", why="one convolution, which makes several steps of one")
    vocab = Padded("word vocab", words.count("vocab_size"), noun="pieces of words with a time").each()
    t.tensor(f"{below}.decoder_layers.0.weight", vocab, words.count("hidden_size"), 1, role="head")
    t.tensor(f"{below}.decoder_layers.0.bias", vocab, role="head_bias")
    return t


def _encoder(c: Config, *, normed: bool, first: bool) -> Table:
    """The layers; ``normed`` says whether queries and keys of a head are, ``first`` whether frames come in here."""
    hidden, count, layer = c.count("hidden_size"), c.count("num_attention_heads"), "@layers.{layer}"
    heads, size = Heads("heads", count, count), c.head_dim(count)
    t = Table(c.count("num_hidden_layers"))
    if first:
        t.whole("@pre_encode.proj.weight", hidden, None, why=FRAMES)
    t.linear(f"{layer}.attn.w_qkv", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv")
    t.linear(f"{layer}.attn.out_proj", hidden, heads.query(size), role="o", bias=True)
    if normed:
        norms(t, f"{layer}.attn", ("q_norm", "k_norm"), size, bias=True)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    mlp(t, f"{layer}.ffn", ffn, hidden, names=("net.0", "net.3"))
    norms(t, layer, ("norm1", "norm2"), hidden, bias=True)
    for norm in ("embed_norm", "final_norm"):
        t.norm(f"@{norm}", hidden, bias=True)
    return t
