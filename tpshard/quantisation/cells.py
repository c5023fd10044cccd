"""Scales and zero points of groups: which group each index of a window is of, before they are spread over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from .formats import Of
from .valuecodes import Array

Bounds: TypeAlias = "tuple[int, int]"


class Cells(NamedTuple):
    """Values of groups ``[bank?, out, in]``, and for every dimension the group of each index of a window.

    Without a map the values are one for each index, or one for all.
    """

    values: Array
    maps: tuple[Array | None, ...]

    def spread(self) -> Array:
        """The values, as they broadcast to the window."""
        out = self.values
        for axis, found in enumerate(self.maps):
            if found is not None and out.shape[axis] > 1:
                out = np.take(out, found, axis)
        return out


def shared_cells(cells: Sequence[Cells]) -> Cells | None:
    """The finest of several groupings, where all others are that or one for all; None where none is."""
    finest = max(cells, key=lambda cell: cell.values.size, default=None)
    for cell in cells:
        assert finest is not None
        for axis, (found, other) in enumerate(zip(cell.maps, finest.maps, strict=True)):
            if cell.values.shape[axis] == 1:
                continue
            if cell.values.shape[axis] != finest.values.shape[axis]:
                return None
            if found is not other and (found is None or other is None or not np.array_equal(found, other)):
                return None
    return finest


def cell_of_each(length: int, entry: Of, bounds: Bounds, groups: Array | None) -> Array | None:
    """The stored index of every one of the window along a dimension; None where it is its own, or there is one."""
    if groups is not None and entry.stored != entry.per:
        return groups
    if entry.stored == entry.per or length == 1:
        return None
    low, high = bounds
    return np.arange(low, high) // (entry.per // entry.stored) - low // entry.per * entry.stored
