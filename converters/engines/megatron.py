"""Megatron's checkpoints today (``--ckpt-format torch_dist``): global tensors, loadable at any degree.

``--load OUT``; with ``--tp``, ``--pp`` and ``--ep`` the chunks are those that ranks of these degrees read whole. Where
all layers are alike they are stacked in one tensor, else each has its own. ``[gate; up]`` is cut apart: all gates, then
all ups. Norms have Transformer Engine's names even where the local layers are used, but for one: version ``local`` has
the norm before experts where those layers look for it.

Left out is ``_extra_state``, what Transformer Engine remembers of FP8: a loader that asks for it takes the model
without (``--dist-ckpt-strictness log_unexpected``).

Source: megatron-core 0.16.1 ``core/transformer/transformer_block.py``, ``moe/experts.py`` (``sharded_state_dict``), and
:mod:`.megatron_names`.
"""

from __future__ import annotations

import json
import re

from tpshard.exporting.enginetable import DISTCP, EngineTable, Entry, Version
from tpshard.exporting.grid import Grid, Rank
from tpshard.exporting.parts import Model
from tpshard.exporting.torchcontainer import torch_file
from tpshard.exporting.torchpickle import Namespace

from .megatron_legacy import arguments
from .megatron_names import (
    attention,
    dropped,
    ends,
    expert_layers,
    gated,
    norms,
    require_equal_experts,
    router,
    rows,
)

ENGINE = "megatron"
SUMMARY = "Megatron's torch_dist: global tensors, loaded at any degree"
VERSIONS = (
    Version("te", "keys of Transformer Engine's layers; megatron-core 0.16.1's own loader reads the dense ones"),
    Version("local", "megatron-core 0.16.1's own loader reads it into its local layers, every parameter equal"),
)

PATTERN = re.compile(r"(?:(?:release|iter_\d{7})/)?\.metadata")
CONTAINER = DISTCP


def table(model: Model, version: str) -> EngineTable:
    """What a distributed checkpoint of Megatron holds of a model.

    Raises:
        UnsupportedError: the layout has no place for one of its tensors.
    """
    own = apart(model)
    layer, at = ("decoder.layers.{layer}", "") if own else ("decoder.layers", "@{layer}")
    layered = (*norms(model, True, layer, before_experts=version == "te"), *attention(layer), *router(layer))
    entries = [*ends(), *(entry._replace(name=entry.name + at) for entry in layered)]
    for words, module in (("", "mlp"), ("shared_", "mlp.shared_experts"), ("expert_", "mlp.experts.experts")):
        name, index = f"{layer}.{module}", at
        if words == "expert_":
            index = "@{expert}" if own else "@{layer}.{expert}"
        if gated(model):
            entries += [Entry(f"{words}{word}", f"{name}.linear_fc1.{{kind}}{index}#{number}/2")
                        for number, word in enumerate(("gate", "up"))]  # fmt: skip
        else:
            entries.append(Entry(f"{words}up", f"{name}.linear_fc1.{{kind}}{index}"))
        entries.append(Entry(f"{words}down", f"{name}.linear_fc2.{{kind}}{index}"))
    return EngineTable(
        entries,
        file_name,
        vocabulary=rows,
        tied=("embed",),
        tied_last="",
        ep_inside=False,
        drop=lambda part: dropped(part, model),
        container=DISTCP,
        sides=lambda model, grid: sides(model, grid),
    )


def apart(model: Model) -> bool:
    """Whether layers are of several kinds (``moe_layer_freq``), so that each is a tensor of its own."""
    return 0 < len([layer for layer in expert_layers(model) if layer < model.layers]) < model.layers


def file_name(grid: Grid, rank: Rank, part: int, parts: int) -> str:
    return f"release/__{grid.ranks.index(rank)}_0.distcp"


def sides(model: Model, grid: Grid) -> dict[str, bytes]:
    """What Megatron reads before the tensors."""
    require_equal_experts(model, grid.ep_size)
    common = {
        "args": Namespace({**arguments(model, grid), "ckpt_format": "torch_dist"}), "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": apart(model)},
    }  # fmt: skip
    made = torch_file([], "common", around=common)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
               "common_backend_version": 1}  # fmt: skip
    return {
        "latest_checkpointed_iteration.txt": b"release",
        "release/common.pt": b"".join(data for _, data in made.frame),
        "release/metadata.json": json.dumps(backend).encode(),
    }
