"""The labels of a tensor's indices, in stored order, read as the segments of which a table makes dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from .units import Label


class Part(NamedTuple):
    """A run of segments: ``size`` indices for each unit or group, ``count`` units in each of ``blocks`` blocks.

    ``kind``: ``unit``, ``group``, ``whole``, or ``grouped``: group after group, ``inner`` for each.
    """

    kind: str
    size: int = 0
    inner: tuple[tuple[str, int], ...] = ()
    block: int = 0

def parts(labels: Sequence[Label], units: int, groups: int) -> list[Part] | None:
    """Labels read as segments; None where they follow no order that a table can say."""
    runs = [(label, len(list(run))) for label, run in groupby(labels)]
    out: list[Part] = []
    at = 0
    while at < len(runs):
        (kind, number), size = runs[at]
        if kind == "whole":
            out.append(Part("whole", size))
            at += 1
            continue
        count = units if kind == "unit" else groups
        ahead = runs[at : at + count]
        if number == 0 and ahead == [((kind, n), size) for n in range(count)]:
            out.append(Part(kind, size))
            at += count
            continue
        found = _grouped(runs[at:], units, groups) or _blocks(runs[at:], units)
        if found is None:
            return None
        out.append(found[0])
        at += found[1]
    return out


def _grouped(runs: Sequence[tuple[Label, int]], units: int, groups: int) -> tuple[Part, int] | None:
    """Group after group the same: ``q q q k v`` and the like."""
    if groups < 2 or groups == units or len(runs) % groups:
        return None
    each, share = len(runs) // groups, units // groups
    inner: list[tuple[str, int]] | None = None
    for group in range(groups):
        own = list(runs[group * each : (group + 1) * each])
        read: list[tuple[str, int]] = []
        while own:
            (kind, _), size = own[0]
            count = share if kind == "unit" else 1
            first = group * share if kind == "unit" else group
            if kind == "whole" or own[:count] != [((kind, first + n), size) for n in range(count)]:
                return None
            read.append((kind, size))
            own = own[count:]
        if inner is not None and inner != read:
            return None
        inner = read
    assert inner is not None
    return Part("grouped", 0, tuple(inner)), len(runs)


def _blocks(runs: Sequence[tuple[Label, int]], units: int) -> tuple[Part, int] | None:
    """Blocks of some units, in each block several times: CodeGen's ``[4 blocks][q v k][heads of a block]``."""
    size = runs[0][1]
    numbers = [label[1] for label, length in runs if label[0] == "unit" and length == size]
    if len(numbers) != len(runs) or len(runs) % units:
        return None
    times = len(runs) // units
    for block in range(1, units):
        if units % block == 0 and numbers == [
            first + n for first in range(0, units, block) for _ in range(times) for n in range(block)
        ]:
            return Part("blocks", size, (("unit", times),), block), len(runs)
    return None
