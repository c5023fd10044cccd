"""Proves a plan: every byte of every target tensor is written once, every source byte is accounted for.

The proof looks only at the finished tasks, not at how they were made, so that a mistake in the
joining of layouts cannot hide from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
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

    @property
    def stop(self) -> int:
        """Where the last row ends."""
        return self.at + self.rows * self.width


def prove(tasks: Iterable[Task], reads: Sequence[Extent], writes: Sequence[Extent]) -> None:
    """Check that the tasks write every byte of ``writes`` once and account for every byte of ``reads``.

    Raises:
        LayoutError: a byte is written twice or never, or a source byte is neither copied, compared nor
            checked to be padding; the message names the tensor and the counts.
    """
    tasks = tuple(tasks)
    _require_once([task.reads for task in tasks], reads, "read")
    _require_once([task.writes for task in tasks], writes, "written")
    read_sizes, write_sizes = [extent.nbytes for extent in reads], [extent.nbytes for extent in writes]
    proven: set[tuple[object, ...]] = set()  # geometries already shown to be right
    for task in tasks:
        key = (
            id(task.strips),  # alive as long as the tasks are
            tuple(map(read_sizes.__getitem__, task.reads)),
            tuple(map(write_sizes.__getitem__, task.writes)),
        )
        if key in proven:
            continue
        areas = _areas(task)
        for at, number in enumerate(task.reads):
            _require_cover(reads[number], areas.pop((False, at), []), exactly=False)
        for at, number in enumerate(task.writes):
            _require_cover(writes[number], areas.pop((True, at), []), exactly=True)
        for is_write, at in areas:
            raise LayoutError(f"{task.tensor}: {'target' if is_write else 'source'} {at} is used and not listed")
        proven.add(key)


def _require_once(listed: Sequence[tuple[int, ...]], extents: Sequence[Extent], side: str) -> None:
    """Each number of an extent is listed by one task, once."""
    numbers = sorted(chain.from_iterable(listed))
    if numbers == list(range(len(extents))):
        return
    times = Counter(numbers)
    for number, extent in enumerate(extents):
        if times.pop(number, 0) != 1:
            raise LayoutError(f"{extent.tensor} is {side} by {numbers.count(number)} tasks of the plan instead of one")
    raise LayoutError(f"the plan has {len(extents)} extents that are {side}; there is no number {min(times)}")


def _areas(task: Task) -> dict[tuple[bool, int], list[_Area]]:
    areas: dict[tuple[bool, int], list[_Area]] = {}

    def add(is_write: bool, rows: int, spans: Sequence[Span], end: int, column: int, length: int) -> None:
        if not 0 <= end < len(spans):
            raise LayoutError(f"{task.tensor}: a route names end {end} of a strip that has {len(spans)}")
        extent, at, width = spans[end]
        if rows < 0 or column < 0 or length < 0 or column + length > width:
            raise LayoutError(f"{task.tensor}: columns {column}:{column + length} of {rows} rows of {width} bytes")
        areas.setdefault((is_write, extent), []).append(_Area(at, rows, width, column, length))

    for rows, sources, targets, route in task.strips:
        taken: dict[tuple[int, int, int], None] = {}  # one source part may feed several targets
        for copy in route.copies:
            taken[copy.source, copy.source_at, copy.length] = None
            add(True, rows, targets, copy.target, copy.target_at, copy.length)
        for same in route.same:
            taken[same.source, same.source_at, same.length] = None
            taken[same.other, same.other_at, same.length] = None
        for zero in route.zeros:
            taken[zero.source, zero.source_at, zero.length] = None
        for source, column, length in taken:
            add(False, rows, sources, source, column, length)
        for fill in route.fills:
            add(True, rows, targets, fill.target, fill.target_at, fill.length)
    return areas


def _require_cover(extent: Extent, areas: Sequence[_Area], *, exactly: bool) -> None:
    """The areas lie in the extent and cover it; with ``exactly``, none overlaps another.

    All areas of an extent are column ranges of one row width, or byte runs; both are reduced to
    column ranges of row bands.
    """
    widths = {area.width for area in areas if area.rows > 1 and area.length}
    if len(widths) > 1:
        raise LayoutError(f"{extent.tensor}: strips of rows of {sorted(widths)} bytes in one tensor cannot be proven")
    opening: dict[int, list[_Area]] = {}
    for area in areas:
        if area.at < 0 or area.stop > extent.nbytes:
            raise LayoutError(
                f"{extent.tensor}: the plan uses bytes {area.at}:{area.stop} of a tensor of {extent.nbytes} bytes"
            )
        if area.length:
            opening.setdefault(area.at, []).append(area)
    covered = 0
    active: list[_Area] = []
    edges = sorted({edge for group in opening.values() for area in group for edge in (area.at, area.stop)})
    for start, stop in pairwise(edges):
        active = [area for area in active if area.stop > start] + opening.get(start, [])
        covered += _covered(extent, active, start, stop, exactly)
    if covered != extent.nbytes:
        done = "written" if exactly else "accounted for"
        raise LayoutError(f"{extent.tensor}: {covered} of {extent.nbytes} bytes are {done} by the plan")


def _covered(extent: Extent, areas: Sequence[_Area], start: int, stop: int, exactly: bool) -> int:
    """Bytes of ``[start, stop)`` that the areas, all of which span it, cover."""
    ranges, widths = [], set()
    for area in areas:
        if area.rows == 1:  # a run: its columns are bytes
            low, high, width = area.at + area.column - start, area.at + area.column + area.length - start, stop - start
            low, high = max(0, low), min(width, high)
        else:
            low, high, width = area.column, area.column + area.length, area.width
            if (start - area.at) % width or (stop - start) % width:
                raise LayoutError(f"{extent.tensor}: rows begin inside each other at byte {start}")
        ranges.append((low, high))
        widths.add(width)
    if len(widths) > 1:
        raise LayoutError(f"{extent.tensor}: runs and rows overlap in one tensor")
    total, last = 0, 0
    for low, high in sorted(ranges):
        if exactly and low < last and high > low:
            raise LayoutError(f"{extent.tensor}: bytes near {start + low} are written twice by the plan")
        total += max(0, high - max(low, last))
        last = max(last, high)
    return total * ((stop - start) // widths.pop()) if widths else 0
