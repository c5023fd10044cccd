"""Ordered lists of runs: which indices of one dimension a rank stores, and in which order.

All positions are element indices along one dimension and all ranges are half-open. Order is part of
the value: a rank that stores ``[Q;K;V]`` holds its three runs in that order.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

PAD = -1


class Run(NamedTuple):
    """``length`` consecutive indices from ``start``, or ``length`` indices of padding (start ``PAD``)."""

    start: int
    length: int


Runs = tuple[Run, ...]
Bounds = tuple[int, int]  # units [start, stop) of one rank


def joined(runs: Iterable[Run]) -> Runs:
    """The same indices in the same order with adjacent runs fused and empty ones dropped."""
    out: list[Run] = []
    for run in runs:
        if run.length == 0:
            continue
        if out:
            last = out[-1]
            if last.start == PAD == run.start or (last.start != PAD and last.start + last.length == run.start):
                out[-1] = Run(last.start, last.length + run.length)
                continue
        out.append(run)
    return tuple(out)


def total(runs: Runs) -> int:
    """How many indices the runs store, padding included."""
    return sum(run.length for run in runs)


def whole(extent: int) -> Runs:
    """The runs of a holder that keeps all of a dimension."""
    return (Run(0, extent),) if extent else ()


def shifted(runs: Iterable[Run], by: int) -> Runs:
    """The runs moved ``by`` indices up the dimension; padding stays padding."""
    return tuple(run if run.start == PAD else Run(run.start + by, run.length) for run in runs)


def clipped(run: Run, start: int, stop: int) -> Run:
    """The part of a (non-padding) run that lies in ``[start, stop)``; length 0 where there is none."""
    low, high = max(run.start, start), min(run.start + run.length, stop)
    return Run(low, max(0, high - low))


def dealt(units: int, tp_size: int) -> tuple[Bounds, ...]:
    """``units`` dealt in order to ``tp_size`` ranks; the first ``units % tp_size`` ranks get one more."""
    base, extra = divmod(units, tp_size)
    cuts = [rank * base + min(rank, extra) for rank in range(tp_size + 1)]
    return tuple(pairwise(cuts))
