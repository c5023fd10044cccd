"""In which order the tasks of a plan are done, what is done together, and whether numpy is worth its import."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .mover import MOST_VIEWS
from .routing import Extent, Task

_SMALL = 4  # a task is done together with its neighbours when it fills at most 1/4 of a tile
# Rows are joined at some 0.05 microseconds each, or moved one by one at 0.25 where tiles are shared by small tasks
# or rows are so short that a tile has too many; numpy does it at a tenth of that, but takes 0.12 s to import.
_ROW_COST, _LONE_ROW_COST, NUMPY_COST = 0.05e-6, 0.25e-6, 0.12


class Unit(NamedTuple):
    """What a thread takes from the queue: one large task, or several small ones that follow each other."""

    tasks: list[Task]
    together: bool
    strided: bool  # many short rows: wants numpy


class Queue:
    """Hands out units in order; units that want numpy are put off while it is being imported."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._waiting = deque(units)
        self._put_off: deque[Unit] = deque()
        self._lock = threading.Lock()

    def next(self, numpy_loaded: bool) -> Unit | None:
        with self._lock:
            if self._put_off and numpy_loaded:
                return self._put_off.popleft()
            while self._waiting:
                unit = self._waiting.popleft()
                if numpy_loaded or not unit.strided:
                    return unit
                self._put_off.append(unit)
            return self._put_off.popleft() if self._put_off else None


class NumpyImport:
    """Imports numpy in a thread of its own, while others move what doesn't need it."""

    def __init__(self, wanted: bool) -> None:
        self.module: Any = None
        self._thread = threading.Thread(target=self._run, name="tpshard-import", daemon=True) if wanted else None
        if self._thread is not None:
            self._thread.start()

    def _run(self) -> None:
        try:
            import numpy
        except ImportError:
            return  # rows are then moved one by one
        self.module = numpy

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def units_of(
    tasks: Sequence[Task], reads: Sequence[Extent], writes: Sequence[Extent], tile: int, threads: int
) -> list[Unit]:
    """Order the work by place in the source, put small neighbours together, and the very largest tasks first."""
    keyed = []
    total = 0
    for index, task in enumerate(tasks):
        loaded = sum([reads[extent].nbytes for extent in task.reads])
        stored = sum([writes[extent].nbytes for extent in task.writes])
        total += loaded + stored
        first = reads[task.reads[0]] if task.reads else None
        keyed.append((first.file if first else -1, first.offset if first else 0, index, loaded, stored))
    keyed.sort()
    units: list[Unit] = []
    giants: list[tuple[int, int, Unit]] = []
    batch: list[Task] = []
    batch_loaded = batch_stored = 0
    for _, _, index, loaded, stored in keyed:
        task = tasks[index]
        if max(loaded, stored) * _SMALL <= tile:
            if batch and (batch_loaded + loaded > tile or batch_stored + stored > tile):
                units.append(Unit(batch, True, _rows(batch) > 256))
                batch, batch_loaded, batch_stored = [], 0, 0
            batch.append(task)
            batch_loaded += loaded
            batch_stored += stored
            continue
        if batch:
            units.append(Unit(batch, True, _rows(batch) > 256))
            batch, batch_loaded, batch_stored = [], 0, 0
        unit = Unit([task], False, _rows([task]) > 256)
        # one that comes last would leave the other threads idle
        if threads > 1 and (loaded + stored) * threads * 4 > total:
            giants.append((-loaded - stored, index, unit))
        else:
            units.append(unit)
    if batch:
        units.append(Unit(batch, True, _rows(batch) > 256))
    return [unit for _, _, unit in sorted(giants, key=lambda giant: giant[:2])] + units


def _rows(tasks: Sequence[Task]) -> int:
    """How many rows are moved one by one where numpy isn't there."""
    return sum([s.rows * len(s.route.copies) for task in tasks for s in task.strips if s.rows > 1])


def cost_without_numpy(units: list[Unit], tile: int) -> float:
    """Estimate the seconds that moving rows would take without numpy."""
    cost = 0.0
    for unit in units:
        if not unit.strided:
            continue
        for task in unit.tasks:
            for strip in task.strips:
                if strip.rows > 1:
                    copies = len(strip.route.copies)
                    width = sum([span.width for span in strip.sources])
                    few = not unit.together and tile // max(width, 1) * copies <= MOST_VIEWS
                    cost += strip.rows * copies * (_ROW_COST if few else _LONE_ROW_COST)
    return cost
