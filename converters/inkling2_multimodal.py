"""Inkling 2 with images: a ViT with a scale on every residual, and two matrices that join its patches.

Source: transformers ``models/inkling2/modeling_inkling2.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import MODEL, include_tower, language_config, projector_channels
from tpshard.blocks.dense import attention, mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "inkling2_multimodal"
USUAL = {
    "inkling2_vision": {"hidden_size": 1024, "num_hidden_layers": 23, "num_attention_heads": 16, "num_channels": 3,
                        "patch_size": 20, "mlp_ratio": 4.0, "spatial_merge_size": 2, "posemb_grid_size": 32,
                        "projection_hidden_dim": 4096, "text_hidden_size": 4608},
}  # fmt: skip
MODEL_TYPES = ("inkling2", "inkling2_loop", *USUAL)


def table(c: Config) -> Table:
    if c.model_type == "inkling2_vision":
        return _tower(c)
    text = language_config(c, "text_config", model_type=f"{c.model_type}_text")
    t = Table(0, prefixes=MODEL)
    t.include(table_of(text), "model.llm.")
    if c.get("vision_config") is not None:
        tower = part_of(c, "vision_config", model_type="inkling2_vision")
        include_tower(t, Config({**tower.values, "text_hidden_size": text.count("hidden_size")}), "visual")
    return t


def _tower(c: Config) -> Table:
    hidden, count, grid = c.count("hidden_size"), c.count("num_attention_heads"), c.count("posemb_grid_size")
    heads, size, layer = Heads("heads", count, count), c.head_dim(count), "@backbone.layers.{layer}"
    width = c.count("intermediate_size", default=int(hidden * c.get("mlp_ratio")))
    joined, pixels = hidden * c.count("spatial_merge_size") ** 2, c.count("num_channels") * c.count("patch_size") ** 2

    t = Table(c.count("num_hidden_layers"))
    before = "@backbone.embeddings"
    t.linear(f"{before}.patch_embedding", hidden, pixels, role="vision")
    t.tensor(f"{before}.class_embedding", hidden, role="vision")
    t.tensor(f"{before}.cls_position_embedding", hidden, role="position")
    t.tensor(f"{before}.position_embedding", grid * grid, hidden, role="position")
    t.norm("@backbone.ln_pre", hidden, bias=True)
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )  # fmt: skip
    mlp(t, f"{layer}.mlp", Units("ffn", width, noun="feed-forward channels").each(), hidden, names=("c_fc", "c_proj"))
    norms(t, layer, ("ln_1", "ln_2"), hidden, bias=True)
    for name in ("ls_1", "ls_2"):
        t.whole(f"{layer}.{name}.gamma", hidden, why="a scale of the residual stream")
    channels, bias = projector_channels(c.count("projection_hidden_dim")), c.flag("projector_bias", default=False)
    t.linear("@proj_in", channels, joined, role="projector_in", bias=bias)
    t.linear("@proj_out", c.count("text_hidden_size"), channels, role="projector_out", bias=bias)
    return t
