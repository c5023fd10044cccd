"""Emu3, Janus and Apertus 1.5: language models that read, and some make, images as tokens.

What makes tokens of images or sounds and back are convolutional autoencoders, whole; Janus reads images by a SigLIP
tower as well, and has heads for image tokens, which are small and whole too.
Source: transformers ``models/{emu3,janus,apertus1p5}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "emu3"
LANGUAGE = {"apertus1p5": "apertus1p5_text", "emu3": "emu3_text_model", "janus": "llama"}
MODEL_TYPES = tuple(LANGUAGE)
TOKENIZERS = {
    "apertus1p5": ("vision_tokenizer", "audio_tokenizer"),
    "emu3": ("vqmodel",),
    "janus": ("vqmodel", "aligner", "generation_embeddings", "generation_aligner", "generation_head"),
}


def table(c: Config) -> Table:
    janus = c.model_type == "janus"
    t = Table(0, prefixes=MODEL)
    include_language(t, language_config(c, "text_config", model_type=LANGUAGE[c.model_type], tied=janus))
    if janus:
        include_tower(t, part_of(c, "vision_config", model_type="janus_vision_model"), "vision_model")
    for module in TOKENIZERS[c.model_type]:
        t.whole_module(f"@{module}", why="makes tokens of images or sounds, or back, and is small beside the model")
    return t
