"""Reads back what every rank holds of a tensor, as units of axes, from the bare runs of its cut.

:mod:`tpshard.partition` deals units to ranks and turns them into runs; this module goes the other way
and shares no step with it, so that :mod:`tpshard.planrules` judges the runs and not the intention.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import NamedTuple

from .axes import Axis, Dim, replicated
from .intervals import PAD, Run, Runs, joined
from .manifest import Manifest, Note
from .partition import Partition

Span = tuple[int, int]  # units [start, stop)
Spans = tuple[Span, ...]  # in the order in which the rank stores them


class Stream(NamedTuple):
    """One run through an axis' units inside a dimension: ``[gate; up]`` has slots 0 and 1 of one view."""

    axis: Axis
    view: str
    slot: int


class Planned(NamedTuple):
    """A tensor with its meaning and its cut: one :class:`Dim` and one :class:`Partition` a dimension."""

    name: str
    shape: tuple[int, ...]
    role: str
    note: str
    dims: tuple[Dim, ...]
    parts: tuple[Partition, ...]


@dataclass
class CutDim:
    """A dimension along axes: by stream what every rank holds, in its own order.

    ``side`` counts dimensions from the last (0 is the last), so that stacked and single matrices compare.
    """

    side: int
    held: dict[Stream, list[Spans]] = field(default_factory=dict)
    sizes: dict[Stream, int] = field(default_factory=dict)
    padding: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the streams, each once."""
        return tuple(dict.fromkeys(stream.axis for stream in self.held))


def planned(manifest: Manifest) -> dict[str, Planned]:
    """The tensors of a manifest by name."""
    cuts = {stored.name: stored.pieces[0].cut for stored in manifest.layout.stored}
    out = {}
    for name, _, shape in manifest.tensors:
        note, dims = manifest.notes[name], manifest.dims[name]
        if manifest.is_held_whole(name):  # at this degree it is like any other that every rank holds whole
            note, dims = Note("whole"), tuple(map(replicated, shape))
        out[name] = Planned(name, shape, note.role, note.text, dims, cuts[name].dims)
    return out


def unit_noun(axis: Axis, view: str) -> str:
    """The units of a view in words: ``query heads``, ``kv heads``, ``feed-forward channels``."""
    name = "group_noun" if view == "kv" else "noun"
    return str(getattr(axis, name, "units"))


def spans_text(spans: Spans) -> str:
    """``0:4 8:12``, or ``none``."""
    return " ".join(f"{start}:{stop}" for start, stop in spans) or "none"


def read_dim(dim: Dim, part: Partition, side: int) -> CutDim:
    """What every rank holds of a dimension along axes, with everything in it that is no whole unit in stored order."""
    segments = dim.segments
    begins = [0, *accumulate(segment.length for segment in segments)]
    out = CutDim(side)
    streams = _streams(dim)
    for stream, segment in zip(streams, segments, strict=True):
        if stream is not None:
            out.held.setdefault(stream, [() for _ in part.ranks])
            out.sizes.setdefault(stream, segment.size)
    for rank, runs in enumerate(part.ranks):
        held: dict[Stream, list[Span]] = {}
        whole = [0] * len(segments)
        last = -1
        padding = 0
        for run in joined(runs):
            if run.start == PAD:
                padding += run.length
                continue
            if padding:
                out.faults.append(f"rank {rank} stores padding before data")
            for at, low, high in _pieces(run, begins):
                if at < last:
                    out.faults.append(
                        f"rank {rank} stores its parts in another order than the tensor has them: "
                        f"index {begins[at] + low} comes after {begins[last]}"
                    )
                last = max(last, at)
                stream, segment = streams[at], segments[at]
                if stream is None:
                    whole[at] += high - low
                    continue
                if low % segment.size or high % segment.size:
                    noun = unit_noun(stream.axis, stream.view)
                    out.faults.append(
                        f"rank {rank} holds a part of a unit: indices {begins[at] + low}:{begins[at] + high}, "
                        f"where the {noun} have {segment.size} indices each"
                    )
                    continue
                first = segment.start + low // segment.size * segment.per
                end = min(segment.start + high // segment.size * segment.per, segment.stop)
                _append(held.setdefault(stream, []), first, end)
        for at, segment in enumerate(segments):
            if streams[at] is None and whole[at] != segment.length and runs:
                out.faults.append(f"rank {rank} lacks some of the indices that no axis cuts")
        for stream, spans in held.items():
            out.held[stream][rank] = tuple(spans)
        out.padding.append(padding)
    return out


def _streams(dim: Dim) -> list[Stream | None]:
    """The stream of every segment: a segment opens a new slot where it comes back to units that went before."""
    ends: dict[tuple[Axis, str], list[int]] = {}
    out: list[Stream | None] = []
    for segment in dim.segments:
        if segment.axis is None:
            out.append(None)
            continue
        slots = ends.setdefault((segment.axis, segment.view), [])
        slot = len(slots)
        if slots and min(slots) <= segment.start:  # else none is free: there may be as many as a matrix has rows
            slot = next(number for number, end in enumerate(slots) if end <= segment.start)
        slots[slot : slot + 1] = [segment.stop]
        out.append(Stream(segment.axis, segment.view, slot))
    return out


def _pieces(run: Run, begins: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """The segments that a run touches, with the indices inside each: ``(segment, low, high)``."""
    start, stop = run.start, run.start + run.length
    at = bisect_right(begins, start) - 1
    while start < stop and at + 1 < len(begins):
        high = min(stop, begins[at + 1])
        if high > start:
            yield at, start - begins[at], high - begins[at]
        start = max(start, high)
        at += 1


def _append(spans: list[Span], start: int, stop: int) -> None:
    if spans and spans[-1][1] == start:
        spans[-1] = (spans[-1][0], stop)
    else:
        spans.append((start, stop))


def units_of(spans: Spans) -> list[int]:
    """The units one by one, in stored order."""
    return [unit for start, stop in spans for unit in range(start, stop)]


def tiling_fault(held: Sequence[Spans], count: int) -> str:
    """Why the ranks' units do not tile ``[0, count)`` exactly once; "" where they do."""
    spans = sorted((start, stop, rank) for rank, of_rank in enumerate(held) for start, stop in of_rank)
    end, owner = 0, -1
    for start, stop, rank in spans:
        if start > end:
            return f"{_counted(end, start)} on no rank"
        if start < end:
            return f"{_counted(start, min(end, stop))} on rank {owner} and again on rank {rank}"
        end, owner = stop, rank
    return f"{_counted(end, count)} on no rank" if end < count else ""


def _counted(start: int, stop: int) -> str:
    return f"{start} is" if stop - start == 1 else f"{start}:{stop} are"


def hole(tensor: Planned, tp_size: int) -> str:
    """An index of the tensor that no rank holds, in words; "" where every index is held."""
    cut = [number for number, part in enumerate(tensor.parts) if not part.is_whole]
    if not cut or 0 in tensor.shape:
        return ""
    marks: list[list[int]] = []
    for number in cut:
        part = tensor.parts[number]
        edges = {0, part.extent}
        for runs in part.ranks:
            edges.update(edge for run in runs if run.start != PAD for edge in (run.start, run.start + run.length))
        marks.append(sorted(edges))
    held: set[tuple[int, ...]] = set()
    for rank in range(tp_size):
        if any(not part.ranks[rank] for part in tensor.parts):
            continue
        rows = [_cells(tensor.parts[n].ranks[rank], edges) for n, edges in zip(cut, marks, strict=True)]
        held.update(product(*rows))
    for cell in product(*(range(len(edges) - 1) for edges in marks)):
        if cell not in held:
            where = ", ".join(
                f"{edges[at]}:{edges[at + 1]} of dimension {number}"
                for number, edges, at in zip(cut, marks, cell, strict=True)
            )
            return f"indices {where} are on no rank"
    return ""


def _cells(runs: Runs, edges: Sequence[int]) -> list[int]:
    """The numbers of the ranges between ``edges`` that the runs cover; every end of a run is an edge."""
    return [
        cell
        for run in runs
        if run.start != PAD
        for cell in range(bisect_left(edges, run.start), bisect_left(edges, run.start + run.length))
    ]


def held_twice(tensor: Planned) -> str:
    """An index that one rank stores twice, in words; "" where there is none."""
    for number, part in enumerate(tensor.parts):
        for rank, runs in enumerate(part.ranks):
            end = 0
            for run in sorted(run for run in runs if run.start != PAD):
                if run.start < end:
                    return f"rank {rank} stores index {run.start} of dimension {number} twice"
                end = run.start + run.length
                if end > part.extent:
                    return f"rank {rank} stores index {end - 1} of dimension {number}, which has {part.extent}"
    return ""
