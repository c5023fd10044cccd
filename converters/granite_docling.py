"""Granite Docling: a SigLIP tower, and connectors that join its patches coarsely or finely, one matrix each.

What earlier layers of the tower give goes through two matrices each into the language model's first layers.
Source: transformers ``models/granite_docling/modeling_granite_docling.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import (
    MODEL,
    include_language,
    include_tower,
    input_norm,
    language_config,
    projector,
    whole_projector,
)
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "granite_docling"
MODEL_TYPES = ("granite_docling",)
ROUTER = "every rank chooses the same way for a page"


def table(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="granite_docling_text", tied=True)
    tower = part_of(c, "vision_config", model_type="granite_docling_vision")
    width, out = tower.count("hidden_size"), tower.count("out_hidden_size", default=1024)
    factor = tower.count("scale_factor", default=4)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_model")
    at = "@vision_model.connector"
    input_norm(t, f"{at}.ln_in", width)
    input_norm(t, f"{at}.ln_mid", out)
    whole_projector(t, f"{at}.mlp_fc2", out, out, bias=False)
    t.norm(f"{at}.ln_out", out, bias=True)
    paths = {"coarse": factor, "fine": factor // 2}
    if not tower.flag("use_fine_route", default=True):
        del paths["fine"]
    for path, side in paths.items():
        joined = width * side**2
        whole_projector(t, f"{at}.{path}.projection", joined, out, bias=False)
        for number in range(len(tower.get("deepstack_visual_indexes", default=[3, 7, 10]))):
            merger = f"{at}.{path}.deepstack_mergers.{number}"
            input_norm(t, f"{merger}.layer_norm", joined)
            projector(t, merger, joined, out, out)
    if c.get("density_router_hidden_size") is not None:
        _router(t, width, c.count("density_router_hidden_size"))
    return t


def _router(t: Table, width: int, channels: int) -> None:
    for name, out, into in (("att", 1, width), ("fc1", channels, width), ("fc2", 1, channels)):
        t.whole(f"@density_router.{name}.weight", out, into, why=ROUTER)
        t.whole(f"@density_router.{name}.bias", out, why=ROUTER)
    for part in ("weight", "bias"):
        t.whole(f"@density_router.norm.{part}", width, why=ROUTER)
