"""The vision tower of Llama 3.2 Vision: two stacks of layers, of which the second scales what its blocks give.

Positions and tiles have tables with a gate each, all of them whole.
Source: transformers ``models/mllama/modeling_mllama.py`` (``MllamaVisionModel``).
"""

from __future__ import annotations

from tpshard.axes import Dim, Heads
from tpshard.blocks.dense import attention, channels_of, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "mllama_vision"
MODEL_TYPES = ("mllama_vision_model",)
USUAL = {
    "mllama_vision_model": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
                            "num_global_layers": 8, "attention_heads": 16, "num_channels": 3, "image_size": 448,
                            "patch_size": 14, "max_num_tiles": 4, "vision_output_dim": 7680},
}  # fmt: skip
RATIOS = 8  # of width to height that four tiles may have


def table(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("attention_heads", "num_attention_heads")
    heads, size, ffn = Heads("heads", count, count), hidden // count, channels_of(c)
    patch, tiles = c.count("patch_size"), c.count("max_num_tiles")
    places = (c.count("image_size") // patch) ** 2 + 1
    ratios = len(c.get("supported_aspect_ratios", default=[None] * RATIOS)) + 1

    t = Table(0)
    t.tensor("@patch_embedding.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor("@class_embedding", hidden, role="vision")
    t.tensor("@gated_positional_embedding.embedding", places, hidden, role="position")
    t.tensor("@gated_positional_embedding.gate", 1, role="position")
    t.embedding("@gated_positional_embedding.tile_embedding", ratios, tiles * places * hidden, role="position")
    for at in ("pre_tile_positional_embedding", "post_tile_positional_embedding"):
        t.embedding(f"@{at}.embedding", ratios, tiles * hidden, role="position")
        t.tensor(f"@{at}.gate", 1, role="position")
    t.norm("@layernorm_pre", hidden, bias=True)
    t.norm("@layernorm_post", hidden, bias=True)
    with t.stack(c.count("num_hidden_layers"), prefixes=("transformer.",)):
        _layer(t, heads, size, ffn, hidden)
    with t.stack(c.count("num_global_layers"), prefixes=("global_transformer.",)):
        _layer(t, heads, size, ffn, hidden)
        for gate in ("gate_attn", "gate_ffn"):
            t.whole(f"@layers.{{layer}}.{gate}", 1, why="a scale of the summed output")
    return t


def _layer(t: Table, heads: Heads, size: int, ffn: Dim, hidden: int) -> None:
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden)
    mlp(t, f"{layer}.mlp", ffn, hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
