"""Gemma 4 with images and sounds, Gemma 4 Unified without towers, and DiffusionGemma, which denoises what it writes.

Unified models take patches and sounds by small matrices of their own. DiffusionGemma's encoder and decoder are one
language model; files hold it below ``decoder``.
Source: transformers ``models/{gemma4,gemma4_unified,diffusion_gemma}/modeling_*.py``, and ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector_channels
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "gemma4_multimodal"
MODEL_TYPES = ("diffusion_gemma", "gemma4", "gemma4_unified")
ONE_MATRIX = "one small matrix: a cut would need a gather of all that it makes"


def table(c: Config) -> Table:
    text = language_config(c, "text_config", model_type=f"{c.model_type}_text", tied=True)
    hidden, t = text.count("hidden_size"), Table(0, prefixes=MODEL)
    if c.model_type == "diffusion_gemma":
        t.include(table_of(text), ("model.decoder.", ""), ("decoder.", ""))
        channels = projector_channels(text.count("intermediate_size"), "conditioning")
        t.linear("@decoder.self_conditioning.gate_proj", channels, hidden, role="projector_in")
        t.linear("@decoder.self_conditioning.up_proj", channels, hidden, role="projector_in")
        t.linear("@decoder.self_conditioning.down_proj", hidden, channels, role="projector_out")
        t.norm("@decoder.self_conditioning.pre_norm", hidden)
        with t.stack(text.count("num_hidden_layers"), prefixes=MODEL):  # the rest of the encoder is the decoder's
            t.tensor("@encoder.language_model.layers.{layer}.layer_scalar", 1, role="buffer")
    else:
        include_language(t, text)
    if c.model_type == "gemma4_unified":
        _unified(t, c, hidden)
        return t
    outer = "encoder." if c.model_type == "diffusion_gemma" else ""
    if c.get("vision_config") is not None:
        tower = part_of(c, "vision_config", model_type="gemma4_vision")
        include_tower(t, tower, f"{outer}vision_tower")
        width = tower.count("hidden_size")
        t.whole(f"@{outer}embed_vision.embedding_projection.weight", hidden, width, why=ONE_MATRIX)
    if c.get("audio_config") is not None:
        tower = part_of(c, "audio_config", model_type="gemma4_audio")
        include_tower(t, tower, "audio_tower", axes="audio_")
        width = tower.count("output_proj_dims")
        t.whole("@embed_audio.embedding_projection.weight", hidden, width, why=ONE_MATRIX)
    return t


def _unified(t: Table, c: Config, hidden: int) -> None:
    if c.get("vision_config") is not None:
        vision = c.nested("vision_config", patch_size=16, pooling_kernel_size=3, mm_embed_dim=3840, mm_posemb_size=1120)
        width = vision.count("mm_embed_dim")
        pixels = 3 * (vision.count("patch_size") * vision.count("pooling_kernel_size")) ** 2
        for block, at, last in (
            ("as saved", "@embed_vision", "@embed_vision.multimodal_embedder"),
            ("as published", "@vision_embedder", "@embed_vision"),
        ):
            with t.block(block):
                t.norm(f"{at}.patch_ln1", pixels, bias=True)
                t.whole(f"{at}.patch_dense.weight", width, pixels, why=ONE_MATRIX)
                t.whole(f"{at}.patch_dense.bias", width, why=ONE_MATRIX)
                t.norm(f"{at}.patch_ln2", width, bias=True)
                t.tensor(f"{at}.pos_embedding", vision.count("mm_posemb_size"), 2, width, role="position")
                t.norm(f"{at}.pos_norm", width, bias=True)
                t.whole(f"{last}.embedding_projection.weight", hidden, width, why=ONE_MATRIX)
        t.one_of("as saved", "as published")
    if c.get("audio_config") is not None:
        width = c.nested("audio_config", audio_embed_dim=640).count("audio_embed_dim")
        t.whole("@embed_audio.embedding_projection.weight", hidden, width, why=ONE_MATRIX)
