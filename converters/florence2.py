"""Florence-2: a DaViT tower, whose blocks attend within windows and then among channels, and BART.

Both kinds of attention have q, k and v as three blocks of a matrix, cut by heads or by groups of channels; every stage
of the tower has its own width and numbers of heads. The convolutions around them are whole.
Source: transformers ``models/florence2/modeling_florence2.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import MODEL, include_tower, whole_projector
from tpshard.blocks.dense import mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "florence2"
USUAL = {
    "florence_vision": {"in_channels": 3, "depths": [1, 1, 9, 1], "patch_size": [7, 3, 3, 3],
                        "patch_prenorm": [False, True, True, True], "embed_dim": [128, 256, 512, 1024],
                        "num_heads": [4, 8, 16, 32], "num_groups": [4, 8, 16, 32], "mlp_ratio": 4.0,
                        "projection_dim": 1024, "max_temporal_embeddings": 100, "max_position_embeddings": 50},
}  # fmt: skip
MODEL_TYPES = ("florence2", "florence_vision")
CONVOLUTION = "a convolution of every channel with its neighbours, beside the residual stream"


def table(c: Config) -> Table:
    if c.model_type == "florence_vision":
        return _tower(c)
    tower = part_of(c, "vision_config", model_type="florence_vision")
    text = part_of(c, "text_config", model_type="bart")
    # Its own class is none of BART's that lack a side.
    text = Config({**text.values, "architectures": ["BartForConditionalGeneration"]})

    t = Table(0, prefixes=MODEL)
    places = "model.language_model.", "language_model.model.", "language_model."
    t.include(table_of(text), *((place, outer) for place in places for outer in ("", place, "language_model.")))
    include_tower(t, tower, "vision_tower")
    stages = len(tower.get("depths"))
    last = Config({"embed_dim": tower.listed("embed_dim", stages)[-1]}).count("embed_dim")
    at, out, places_of = "@multi_modal_projector", tower.count("projection_dim"), tower.count("max_position_embeddings")
    whole_projector(t, f"{at}.image_projection", last, out, bias=False)
    t.norm(f"{at}.image_proj_norm", out, bias=True)
    t.embedding(f"{at}.image_position_embed.row_embeddings", places_of, last // 2, role="position")
    t.embedding(f"{at}.image_position_embed.column_embeddings", places_of, last - last // 2, role="position")
    times = tower.count("max_temporal_embeddings")
    t.tensor(f"{at}.visual_temporal_embed.pos_idx_to_embed", times, last, role="buffer", optional=True)
    return t


def _tower(c: Config) -> Table:
    depths = c.get("depths")
    lists = {name: c.listed(name, len(depths)) for name in ("embed_dim", "num_heads", "num_groups", "patch_size")}
    before = c.count("in_channels")

    t = Table(0)
    for number, depth in enumerate(depths):
        stage = Config({"depth": depth, **{name: values[number] for name, values in lists.items()}})
        width, patch = stage.count("embed_dim"), stage.count("patch_size")
        t.tensor(f"@convs.{number}.conv.weight", width, before, patch, patch, role="vision")
        t.tensor(f"@convs.{number}.conv.bias", width, role="vision_bias")
        first = c.listed("patch_prenorm", len(depths))[number]
        t.norm(f"@convs.{number}.norm", before if first else width, bias=True)
        channels = int(width * c.get("mlp_ratio", default=4.0))
        ffn = Units(f"ffn_{number}", channels, noun=f"feed-forward channels of stage {number}").each()
        for block in range(stage.count("depth")):
            for kind, inner, key in (("spatial", "window", "num_heads"), ("channel", "channel", "num_groups")):
                heads = Heads(f"{inner}_{number}", stage.count(key), stage.count(key))
                _block(t, c, f"@blocks.{number}.{block}.{kind}_block", f"{inner}_attn", heads, width)
                mlp(t, f"@blocks.{number}.{block}.{kind}_block.ffn", ffn, width)
        before = width
    return t


def _block(t: Table, c: Config, at: str, inner: str, heads: Heads, width: int) -> None:
    size = width // heads.query_heads
    qkv = heads.query(size) + heads.kv(size) * 2
    t.linear(f"{at}.{inner}.qkv", qkv, width, role="qkv", bias=c.flag("qkv_bias", default=True))
    t.linear(f"{at}.{inner}.proj", width, heads.query(size), role="o", bias=True)
    for number in (1, 2):
        t.whole(f"{at}.conv{number}.weight", width, 1, 3, 3, why=CONVOLUTION)
        t.whole(f"{at}.conv{number}.bias", width, why=CONVOLUTION)
    norms(t, at, ("norm1", "norm2"), width, bias=True)
