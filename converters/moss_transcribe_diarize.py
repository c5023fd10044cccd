"""MOSS Transcribe-Diarize: Whisper's encoder, four of its frames joined, two matrices and a norm, a Qwen3.

Source: transformers ``models/moss_transcribe_diarize/modeling_moss_transcribe_diarize.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector
from tpshard.blocks.dense import channels_of, mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "moss_transcribe_diarize"
MODEL_TYPES = ("moss_transcribe_diarize", "moss_transcribe_diarize_audio")
USUAL = {
    "moss_transcribe_diarize_audio": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                                      "num_attention_heads": 16, "num_mel_bins": 80, "max_source_positions": 1500},
}  # fmt: skip


def table(c: Config) -> Table:
    if c.model_type == "moss_transcribe_diarize_audio":
        return _tower(c)
    text = language_config(c, "text_config", model_type="qwen3", tied=True)
    tower = part_of(c, "audio_config", model_type="moss_transcribe_diarize_audio")
    hidden, joined = text.count("hidden_size"), c.count("audio_merge_size", default=4) * tower.count("hidden_size")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "audio_tower", axes="audio_")
    projector(
        t, "@multi_modal_projector", joined, hidden, hidden, bias=c.flag("projector_bias", default=True)
    )
    for part in ("weight", "bias"):
        t.whole(f"@multi_modal_projector.norm.{part}", hidden, why="a norm of the summed output")
    return t


def _tower(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", count, count), c.head_dim(count)

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@conv1.weight", hidden, c.count("num_mel_bins"), 3, role="vision")
    t.tensor("@conv2.weight", hidden, hidden, 3, role="vision")
    for conv in ("conv1", "conv2"):
        t.tensor(f"@{conv}.bias", hidden, role="vision_bias")
    t.embedding("@embed_positions", c.count("max_source_positions"), hidden, role="position")
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", heads.query(size), hidden, role="q", bias=True)
    t.linear(f"{layer}.self_attn.k_proj", heads.kv(size), hidden, role="k")
    t.linear(f"{layer}.self_attn.v_proj", heads.kv(size), hidden, role="v", bias=True)
    t.linear(f"{layer}.self_attn.out_proj", hidden, heads.query(size), role="o", bias=True)
    mlp(t, layer, channels_of(c), hidden)
    norms(t, layer, ("self_attn_layer_norm", "final_layer_norm"), hidden, bias=True)
    t.norm("@layer_norm", hidden, bias=True)
    return t
