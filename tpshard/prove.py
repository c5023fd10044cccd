"""Proves a plan: every byte of every target tensor is written once, every source byte is accounted for.

The proof looks only at the finished tasks, not at how they were made, so that a mistake in the
joining of layouts cannot hide from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .errors import LayoutError
from .routing import Extent, Span, Task


class _Area(NamedTuple):
    """Columns ``[column, column + length)`` of ``rows`` rows of ``width`` bytes from byte ``at`` of a tensor."""

    at: int
    rows: int
    width: int
    column: int
    length: int


def prove(tasks: Iterable[Task], reads: Sequence[Extent], writes: Sequence[Extent]) -> None:
    """Check that the tasks write every byte of ``writes`` once and account for every byte of ``reads``.

    Raises:
        LayoutError: a byte is written twice or never, or a source byte is neither copied, compared nor
            checked to be padding; the message names the tensor and the counts.
    """
    proven: set[tuple[object, ...]] = set()  # geometries already shown to be right
    read_seen, write_seen = bytearray(len(reads)), bytearray(len(writes))
    for task in tasks:
        for number in task.reads:
            read_seen[number] += 1
        for number in task.writes:
            write_seen[number] += 1
        key = _geometry(task, reads, writes)
        if key in proven:
            continue
        areas = _areas(task)
        for number in task.reads:
            _require_cover(reads[number], areas.get((False, number), []), exactly=False)
        for number in task.writes:
            _require_cover(writes[number], areas.get((True, number), []), exactly=True)
        proven.add(key)
    for seen, extents, side in ((read_seen, reads, "read"), (write_seen, writes, "written")):
        for number, times in enumerate(seen):
            if times != 1:
                raise LayoutError(f"{extents[number].tensor} is {side} by {times} tasks of the plan instead of one")


def _geometry(task: Task, reads: Sequence[Extent], writes: Sequence[Extent]) -> tuple[object, ...]:
    """The task without names and places: equal geometries have equal proofs."""
    numbers: dict[tuple[bool, int], int] = {}

    def spans(side: bool, ends: tuple[Span, ...]) -> tuple[tuple[int, int, int], ...]:
        return tuple([(numbers.setdefault((side, e.extent), len(numbers)), e.at, e.width) for e in ends])

    strips = tuple([(s.rows, spans(False, s.sources), spans(True, s.targets), id(s.route)) for s in task.strips])
    sizes = tuple([reads[n].nbytes for n in task.reads]) + tuple([writes[n].nbytes for n in task.writes])
    order = tuple([numbers.get((False, n), -1) for n in task.reads] + [numbers.get((True, n), -1) for n in task.writes])
    return strips, sizes, order


def _areas(task: Task) -> dict[tuple[bool, int], list[_Area]]:
    areas: dict[tuple[bool, int], list[_Area]] = {}

    def add(is_write: bool, rows: int, span: Span, column: int, length: int) -> None:
        if column < 0 or length < 0 or column + length > span.width:
            raise LayoutError(f"{task.tensor}: columns {column}:{column + length} of a row of {span.width} bytes")
        area = _Area(span.at, rows, span.width, column, length)
        areas.setdefault((is_write, span.extent), []).append(area)

    for rows, sources, targets, route in task.strips:
        taken: dict[tuple[int, int, int], None] = {}  # one source part may feed several targets
        for copy in route.copies:
            taken[copy.source, copy.source_at, copy.length] = None
            add(True, rows, targets[copy.target], copy.target_at, copy.length)
        for same in route.same:
            taken[same.source, same.source_at, same.length] = None
            taken[same.other, same.other_at, same.length] = None
        for zero in route.zeros:
            taken[zero.source, zero.source_at, zero.length] = None
        for source, column, length in taken:
            add(False, rows, sources[source], column, length)
        for fill in route.fills:
            add(True, rows, targets[fill.target], fill.target_at, fill.length)
    return areas


def _require_cover(extent: Extent, areas: Sequence[_Area], *, exactly: bool) -> None:
    """The areas cover the extent; with ``exactly``, none overlaps another.

    All areas of an extent are column ranges of one row width, or byte runs; both are reduced to
    column ranges of row bands.
    """
    bands: dict[tuple[int, int], list[_Area]] = {}
    widths = {area.width for area in areas if area.rows > 1 and area.length}
    if len(widths) > 1:
        raise LayoutError(f"{extent.tensor}: strips of rows of {sorted(widths)} bytes in one tensor cannot be proven")
    edges = sorted({edge for a in areas for edge in (a.at, a.at + a.rows * a.width)})
    for area in areas:
        bands.setdefault((area.at, area.at + area.rows * area.width), []).append(area)
    covered = 0
    for start, stop in zip(edges, edges[1:], strict=False):
        columns = [a for (low, high), group in bands.items() if low <= start and stop <= high for a in group]
        covered += _covered(extent, columns, start, stop, exactly)
    if covered != extent.nbytes:
        done = "written" if exactly else "accounted for"
        raise LayoutError(f"{extent.tensor}: {covered} of {extent.nbytes} bytes are {done} by the plan")


def _covered(extent: Extent, areas: Sequence[_Area], start: int, stop: int, exactly: bool) -> int:
    """Bytes of ``[start, stop)`` that the areas, all of which span it, cover."""
    ranges = []
    for area in areas:
        if area.rows == 1:  # a run: its columns are bytes
            low, high = max(start, area.at + area.column), min(stop, area.at + area.column + area.length)
            ranges.append((low - start, high - start, stop - start))
        else:
            ranges.append((area.column, area.column + area.length, area.width))
    total, last = 0, 0
    widths = {width for _, _, width in ranges}
    if len(widths) > 1:
        raise LayoutError(f"{extent.tensor}: runs and rows overlap in one tensor")
    for low, high, _ in sorted(ranges):
        if exactly and low < last and high > low:
            raise LayoutError(f"{extent.tensor}: bytes near {start + low} are written twice by the plan")
        total += max(0, high - max(low, last))
        last = max(last, high)
    return total * ((stop - start) // widths.pop()) if widths and stop > start else 0
