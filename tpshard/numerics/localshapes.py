"""Makes the model of one rank as narrow as the rank's tensors, the way inference engines build it.

Modules of transformers remember counts as plain integers (``num_heads``, ``split_size``,
``intermediate_size``) or look them up in the config. Here every such number of a module that owns cut
tensors becomes the rank's own number, worked out from the axes in the manifest. Whether that is all that
a class needs is not known beforehand: the level *twin* tries it out on a tiny model of the same class.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tpshard.axes import Axis
from tpshard.errors import UnsupportedError
from tpshard.manifest import Manifest
from tpshard.table import NEEDS_GATHER, NEEDS_SUM, NORMED_BY

from .points import base_role
from .skeleton import Skeleton

ATTENTION = frozenset({"q", "k", "v", "qkv", "q_b", "kv_b", "o", "sinks"})
FEED_FORWARD = frozenset(
    [
        "gate",
        "up",
        "gate_up",
        "down",
        "expert_gate",
        "expert_up",
        "expert_gate_up",
        "expert_down",
        "shared_gate",
        "shared_up",
        "shared_down",
    ]
)
STATE_SPACE = frozenset({"ssm_in", "ssm_conv", "ssm_head", "ssm_out"})

QUERY_HEADS = frozenset(["num_heads", "num_attention_heads", "n_heads", "n_head", "nheads", "num_query_heads"])
KV_HEADS = frozenset(["num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads"])
HEADS_PER_KV = frozenset(["num_key_value_groups", "n_rep", "num_queries_per_kv"])
WIDTHS = frozenset(
    [
        "embed_dim",
        "hidden_size",
        "all_head_size",
        "inner_dim",
        "split_size",
        "embed_size",
        "kv_dim",
        "q_dim",
        "kv_size",
        "q_size",
    ]
)
CHANNELS = frozenset(
    [
        "intermediate_size",
        "intermediate_dim",
        "expert_dim",
        "ffn_dim",
        "inner_dim",
        "hidden_dim",
        "ffn_hidden_size",
        "moe_intermediate_size",
    ]
)


@dataclass
class _Owner:
    """What one module's tensors are cut along: for every count of units, what the rank has of it."""

    query: tuple[int, int] | None = None  # (all, this rank's)
    kv: tuple[int, int] | None = None
    head_sizes: set[int] = field(default_factory=set)
    channels: dict[int, int] = field(default_factory=dict)


def localise(skeleton: Skeleton, manifest: Manifest, rank: int) -> list[str]:
    """Change the counts that the skeleton's modules keep to those of ``rank``; says which, for reports.

    Raises:
        UnsupportedError: a tensor needs more than local shapes: a norm over what is cut, or a state-space mixer.
    """
    for name, note in manifest.notes.items():
        if note.text in (NEEDS_SUM, NEEDS_GATHER) or note.text.startswith(NORMED_BY):
            raise UnsupportedError(f"{name} {note.text}, so a rank cannot be run on its own shapes alone")
        if base_role(note) in STATE_SPACE:
            raise UnsupportedError(f"{name} belongs to a state-space mixer, which is run zero-padded")
    changed = []
    shapes = {stored.name: stored.shape(rank) for stored in manifest.layout.stored}
    for path, owner in _owners(skeleton, manifest, rank).items():
        module = skeleton.modules[path]
        for name, value in list(vars(module).items()):
            if isinstance(value, int) and not isinstance(value, bool) and not name.startswith("_"):
                new = _local_count(owner, name, value)
                if new is not None and new != value:
                    setattr(module, name, new)
                    changed.append(f"{path}.{name}: {value} -> {new}")
        config = getattr(module, "config", None)
        if owner.query is not None and config is not None:
            module.config = _local_config(config, owner)
    for path, module in skeleton.modules.items():
        recipe = skeleton.recipe_of(f"{path}.weight") if type(module).__name__ == "Conv1D" else None
        if recipe is not None:
            shape = shapes.get(recipe.tensors[0][0])
            if shape is not None and shape[1] != module.nf:
                changed.append(f"{path}.nf: {module.nf} -> {shape[1]}")
                module.nf = shape[1]
    return changed


def _local_count(owner: _Owner, name: str, value: int) -> int | None:
    """The rank's number where ``value`` counts what is cut, None where it does not."""
    if owner.query is not None:
        (queries, my_queries), (kvs, my_kvs) = owner.query, owner.kv or owner.query
        if name in QUERY_HEADS and value == queries:
            return my_queries
        if name in KV_HEADS and value == kvs:
            return my_kvs
        if name in HEADS_PER_KV and value == queries // kvs:
            return my_queries // my_kvs
        if name in WIDTHS:
            pairs = (
                ((kvs, my_kvs), (queries, my_queries))
                if name.startswith("kv")
                else ((queries, my_queries), (kvs, my_kvs))
            )
            for count, mine in pairs:
                for size in owner.head_sizes:
                    if value == count * size:
                        return mine * size
    if name in CHANNELS:
        return owner.channels.get(value)
    return None


def _local_config(config: Any, owner: _Owner) -> Any:
    assert owner.query is not None
    mine = copy.copy(config)
    if getattr(config, "num_attention_heads", None) == owner.query[0]:
        mine.num_attention_heads = owner.query[1]
    kv = owner.kv or owner.query
    if getattr(config, "num_key_value_heads", None) == kv[0]:
        mine.num_key_value_heads = kv[1]
    return mine


def _owners(skeleton: Skeleton, manifest: Manifest, rank: int) -> dict[str, _Owner]:
    """The modules that keep counts of what is cut: the one around a linear, or the one that holds a bank itself."""
    found: dict[str, _Owner] = {}
    for parameter, tensor in _cut_parameters(skeleton, manifest):
        path = parameter.rpartition(".")[0]
        module = skeleton.modules[path]
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            path = path.rpartition(".")[0]
        role = base_role(manifest.notes[tensor])
        owner = found.setdefault(path, _Owner())
        for dim in manifest.dims[tensor]:
            for axis in dim.axes:
                counts = {
                    view: (count, _held(axis, view, manifest.tp_size, rank)) for view, count in axis.views().items()
                }
                if role in ATTENTION:
                    query = counts.get("query") or counts.get("unit")
                    if query is not None and ("query" in counts or owner.query is None):
                        owner.query = query
                        owner.kv = counts.get("kv", query)
                else:
                    owner.channels.update(dict([counts["unit"]]) if "unit" in counts else {})
            if role in ATTENTION:
                owner.head_sizes |= {s.size for s in dim.segments if s.axis is not None}
    return found


def _cut_parameters(skeleton: Skeleton, manifest: Manifest) -> Iterator[tuple[str, str]]:
    for parameter, recipe in skeleton.recipes.items():
        for tensor, _ in recipe.tensors:
            if base_role(manifest.notes[tensor]) in ATTENTION | FEED_FORWARD:
                yield parameter, tensor


def _held(axis: Axis, view: str, tp_size: int, rank: int) -> int:
    start, stop = axis.bounds(view, tp_size)[rank]
    return stop - start + axis.padding(tp_size)[rank]
