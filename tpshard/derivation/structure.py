"""Units and segments: which index of which tensor belongs to which unit of which axis.

The input channels of the products at which ranks meet are the finest that can be dealt. Channels that are
fed by the same index belong together; what results are units (heads, feed-forward channels, state-space
heads), groups of units that share some indices (query heads over a key-value head), and indices that all
units share. Every index of a tensor along its cut dimension gets a label, and the labels, in stored
order, are what a fusion is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .around import added_once, inside_of, of_logits
from .disk import Disk
from .patterns import Patterns
from .probe import Probe
from .reach import Sum, Trace, traced
from .scan import scanned, watched_of
from .sums import Meeting
from .units import Label, components, copies, cut_dims, differs, groups_of, labelled, run_lengths

MOST_COPIES = 2.0  # times the bytes of an axis that its units may hold together: queries over a KV head stay below it


@dataclass
class AxisFound:
    """An axis: the products along it, how many units, and how many groups of units that share indices.

    ``tensors``: by name on disk the cut dimension and a label for each index: ``("unit", n)``, ``("group", n)``,
    or ``("whole", 0)``. ``ends``: those of the tensors that are summed over. ``channels``: the unit of every channel
    of each product, ``group_of``: the group of every unit.
    """

    sums: frozenset[str]
    units: int
    groups: int
    tensors: dict[str, tuple[int, tuple[Label, ...]]] = field(default_factory=dict)
    ends: frozenset[str] = frozenset()
    channels: dict[Sum, tuple[int, ...]] = field(default_factory=dict)
    group_of: tuple[int, ...] = ()


@dataclass
class Structure:
    """All that was found of one model; names are those on disk."""

    axes: list[AxisFound]
    vocabulary: dict[str, int]  # dimension along the vocabulary of tensors that give the logits
    tables: dict[str, int]  # rows of the tables that ids are looked up in
    once: frozenset[str]  # added after a sum over ranks
    spanning: frozenset[str]  # norms that need a sum over ranks
    inside: frozenset[str]  # whole, in modules whose outputs are a rank's own share
    odd: dict[str, str]  # tensors that were left whole, and why
    patterns: Patterns
    silent: bool  # whether some index of what is cut fed nothing: its unit may have been off for all tokens

def structure(probe: Probe, found: Meeting) -> Structure:
    """Look at every channel of every product at which ranks meet."""
    trace = traced(probe, found.sums, found.spanning)
    disk = Disk(probe)
    sums = sorted(at for at in found.sums if at in trace.seen)
    watched = {at: watched_of(trace, at, found) for at in sums}
    shares = scanned(trace, disk, sums, watched)
    axes: list[AxisFound] = []
    odd: dict[str, str] = {}
    for group in _together(sums, shares):
        axis, left = _axis(probe, disk, trace, group, shares)
        odd |= left
        if axis is not None:
            axes.append(axis)
    tables = {
        name: probe.shapes[name][0]
        for table in trace.tables
        for name, _, _ in disk.parts[table]
        if len(probe.shapes[name]) == 2
    }
    spanning = frozenset(
        name
        for path in found.spanning
        for parameter in probe.parameters
        if parameter.rpartition(".")[0] == path
        for name, _, _ in disk.parts[parameter]
    )
    once = added_once(probe, disk, found)
    inside = inside_of(probe, disk, found, {name for axis in axes for name in axis.tensors})
    return Structure(axes, of_logits(trace, disk), tables, once, spanning, inside, odd, probe.patterns, _silent(shares))


def _together(sums: list[Sum], shares: Mapping[Sum, Mapping[tuple[str, int], torch.Tensor]]) -> list[list[Sum]]:
    """Products that cut one tensor: their channels belong to one axis."""
    groups: list[tuple[list[Sum], set[str]]] = []
    for at in sums:
        names = {name for (name, _), fed in shares[at].items() if differs(fed)}
        joined = [group for group in groups if group[1] & names]
        groups = [group for group in groups if group not in joined]
        groups.append(([s for group in joined for s in group[0]] + [at], names.union(*(g[1] for g in joined))))
    return [group for group, _ in groups]


def _silent(shares: Mapping[Sum, Mapping[tuple[str, int], torch.Tensor]]) -> bool:
    fed = [table for tables in shares.values() for table in tables.values() if differs(table) or not table.any()]
    return any(not bool(table.any(1).all()) for table in fed)


def _axis(
    probe: Probe,
    disk: Disk,
    trace: Trace,
    sums: list[Sum],
    shares: Mapping[Sum, Mapping[tuple[str, int], torch.Tensor]],
) -> tuple[AxisFound | None, dict[str, str]]:
    counts = [trace.channels(at) for at in sums]
    every: dict[tuple[str, int], list[torch.Tensor | None]] = {}
    for n, at in enumerate(sums):
        for key, fed in shares[at].items():
            every.setdefault(key, [None] * len(sums))[n] = fed
    tables = {}
    for (name, dim), parts in every.items():
        length = probe.shapes[name][dim]
        tables[name, dim] = torch.cat(
            [
                torch.zeros((length, c), dtype=torch.bool) if p is None else p
                for p, c in zip(parts, counts, strict=True)
            ],
            1,
        )
    dims = cut_dims(tables)
    ends = frozenset(name for at in sums for name, _, _ in disk.parts[at.parameter])
    starts = [sum(counts[:n]) for n in range(len(counts))]
    alike: dict[bytes, tuple[torch.Tensor, float]] = {}  # tensors of many experts are cut alike
    for name, dim in dims.items():
        key = tables[name, dim].numpy().tobytes()
        fed, before = alike.get(key, (tables[name, dim], 0.0))
        alike[key] = fed, before + _weight(probe.shapes[name], dim)
    indices = list(alike.values())
    chosen: tuple[torch.Tensor, torch.Tensor, dict[str, tuple[int, tuple[Label, ...]]], dict[str, str]] | None = None
    for longest in sorted({length for fed, _ in indices for length in run_lengths(fed, starts)}):
        units = components(indices, starts, longest)
        if int(units.max()) < 1 or copies(indices, units) > MOST_COPIES:
            continue
        groups = groups_of(indices, units)
        found, odd = labelled(dims, tables, units, groups)
        if chosen is None or len(odd) < len(chosen[3]):
            chosen = units, groups, found, odd
        if not odd:
            break
    if chosen is None:
        return None, dict.fromkeys(ends, "all its channels hang together")
    units, groups, found, odd = chosen
    sums_found = frozenset(probe.patterns.of(at.parameter) for at in sums)
    channels = {
        at: tuple(units[start : start + count].tolist()) for at, start, count in zip(sums, starts, counts, strict=True)
    }
    axis = AxisFound(
        sums_found, int(units.max()) + 1, int(groups.max()) + 1, found, ends, channels, tuple(groups.tolist())
    )
    return axis, odd


def _weight(shape: tuple[int, ...], dim: int) -> float:
    return float(torch.tensor(shape).prod()) / shape[dim]
