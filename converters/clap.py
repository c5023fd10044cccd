"""CLAP: a Swin transformer over spectrograms beside RoBERTa, and a small projection behind each.

The stages of the Swin are cut by their own heads; what merges patches between them stays whole.
Source: transformers ``models/clap/modeling_clap.py``.
"""

from __future__ import annotations

from typing import Any

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_layer, encoder_of, pooler
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "clap"
MODEL_TYPES = ("clap", "clap_audio_model", "clap_text_model")
USUAL: dict[str, dict[str, Any]] = {
    "clap_text_model": {"vocab_size": 50265, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                        "intermediate_size": 3072, "max_position_embeddings": 514, "type_vocab_size": 1},
    "clap_audio_model": {"patch_embeds_hidden_size": 96, "depths": [2, 2, 6, 2], "num_attention_heads": [4, 8, 16, 32],
                         "window_size": 8},
}  # fmt: skip
PROJECTION = "it runs once, on one vector a clip or text"


def table(c: Config) -> Table:
    if c.model_type == "clap_text_model":
        return _text(c.with_usual(**USUAL["clap_text_model"]))
    if c.model_type == "clap_audio_model":
        return _audio(c.with_usual(**USUAL["clap_audio_model"]))
    t = Table(0)
    text = table_of(part_of(c, "text_config", model_type="clap_text_model"))
    t.include(text, ("text_model.", "text_model."), axes="text_")
    audio = table_of(part_of(c, "audio_config", model_type="clap_audio_model"))
    t.include(audio, ("audio_model.", "audio_model."), axes="audio_", or_whole=True)
    for projection in ("audio_projection", "text_projection"):
        t.whole_module(projection, why=PROJECTION)
    for scale in ("logit_scale_a", "logit_scale_t"):
        t.whole(scale, why="one number")
    return t


def _text(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    t = Table(c.count("num_hidden_layers"), prefixes=("text_model.", ""))
    embeddings(t, c, vocab, e.hidden)
    t.tensor("@embeddings.token_type_ids", 1, None, role="buffer", optional=True)
    encoder_layer(t, e)
    pooler(t, e.hidden)
    return t


def _audio(c: Config) -> Table:
    """Stages of blocks, each stage twice as wide as the one before and a quarter as long."""
    depths, heads = c.get("depths"), c.get("num_attention_heads")
    if not isinstance(depths, list) or not isinstance(heads, list) or len(depths) != len(heads):
        raise DamagedError(
            f"config.json: 'depths' is {depths!r:.80} and 'num_attention_heads' {heads!r:.80}, which should be lists "
            "of one length; restore them"
        )
    first, at = c.count("patch_embeds_hidden_size"), "audio_encoder"
    table_rows = (2 * c.count("window_size") - 1) ** 2

    t = Table(0)
    for module in ("patch_embed", "batch_norm"):
        t.whole_module(f"{at}.{module}", why="patches of a spectrogram")
    for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
        with t.stack(depth):
            _block(t, f"{at}.layers.{stage}.blocks.{{layer}}", c, stage, first * 2**stage, count, table_rows)
        if stage + 1 < len(depths):
            t.whole_module(f"{at}.layers.{stage}.downsample", why="it joins four patches into one")
    t.norm(f"{at}.norm", first * 2 ** (len(depths) - 1), bias=True)
    return t


def _block(t: Table, layer: str, c: Config, stage: int, width: int, count: int, rows: int) -> None:
    heads, size = Heads(f"heads.{stage}", count, count, or_whole=True), width // count
    wide = int(c.get("mlp_ratio", default=4.0) * width)
    ffn = Units(f"ffn.{stage}", wide, noun="feed-forward channels", or_whole=True).each()
    at, bias = f"{layer}.attention.self", c.flag("qkv_bias", default=True)
    t.linear(f"{at}.query", heads.query(size), width, role="q", bias=bias)
    t.linear(f"{at}.key", heads.kv(size), width, role="k", bias=bias)
    t.linear(f"{at}.value", heads.kv(size), width, role="v", bias=bias)
    t.tensor(f"{at}.relative_position_bias_table", rows, heads.query(1), role="attn_head")
    t.tensor(f"{at}.relative_position_index", None, None, role="buffer", optional=True)
    t.linear(f"{layer}.attention.output.dense", width, heads.query(size), role="o", bias=True)
    t.linear(f"{layer}.intermediate.dense", ffn, width, role="up", bias=True)
    t.linear(f"{layer}.output.dense", width, ffn, role="down", bias=True)
    for norm in ("layernorm_before", "layernorm_after"):
        t.norm(f"{layer}.{norm}", width, bias=True)
