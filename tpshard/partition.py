"""What every rank stores of a dimension: runs of its indices, in stored order, with padding as a fill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .axes import Axis, Dim
from .errors import LayoutError, UnsupportedError, UsageError
from .intervals import PAD, Run, Runs, joined, total, whole


@dataclass(frozen=True, eq=False)
class Partition:
    """Which runs of one dimension every rank stores, in order.

    ``extent`` counts logical indices, padding excluded. A rank with no runs does not store the
    tensor at all. Compared by identity: :func:`partition` returns one object for one value.
    """

    extent: int
    ranks: tuple[Runs, ...]

    @property
    def tp_size(self) -> int:
        return len(self.ranks)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all indices in their order."""
        every = whole(self.extent)
        return all(runs == every for runs in self.ranks)

    def length(self, rank: int) -> int:
        return total(self.ranks[rank])


@lru_cache(maxsize=65536)
def interned(extent: int, ranks: tuple[Runs, ...]) -> Partition:
    """The one Partition of this value.

    Raises:
        LayoutError: a run leaves ``[0, extent)`` or a rank holds an index twice.
    """
    for rank, runs in enumerate(ranks):
        last = 0
        if any(run.length < 0 for run in runs):
            raise LayoutError(f"rank {rank} holds a run of a negative length")
        for run in sorted(run for run in runs if run.start != PAD):
            if run.start < last or run.start + run.length > extent:
                raise LayoutError(f"rank {rank} holds {run.start}:{run.start + run.length} of {extent} out of bounds")
            last = run.start + run.length
    return Partition(extent, ranks)


@lru_cache(maxsize=65536)
def partition(dim: Dim, tp_size: int) -> Partition:
    """The dimension cut over ``tp_size`` ranks: for each rank its units of each segment, in stored order.

    Raises:
        UnsupportedError: an axis has fewer indivisible parts than there are ranks.
    """
    for cut_axis in dim.axes:  # first of all: a degree that cannot be served must cost nothing, however large it is
        require(cut_axis, tp_size)
    ranks: list[list[Run]] = [[] for _ in range(tp_size)]
    at = 0
    for segment in dim.segments:
        axis = segment.axis
        if axis is None:
            for runs in ranks:
                runs.append(Run(at, segment.size))
        else:
            bounds, padding = axis.bounds(segment.view, tp_size), axis.padding(tp_size)
            for runs, (start, stop), pad in zip(ranks, bounds, padding, strict=True):
                low, high = max(start, segment.start), min(stop, segment.stop)
                if high > low:
                    if (low - segment.start) % segment.per or (high != segment.stop and (high - low) % segment.per):
                        raise LayoutError(f"axis {axis.name} is cut inside a group of {segment.per} units")
                    first, count = (low - segment.start) // segment.per, -(-(high - low) // segment.per)
                    runs.append(Run(at + first * segment.size, count * segment.size))
                if pad:  # a group that is short of units is filled up by padding first
                    held = max(high - low, 0)
                    groups = -(-(held + pad) // segment.per) - -(-held // segment.per)
                    if groups:
                        runs.append(Run(PAD, groups * segment.size))
        at += segment.length
    return interned(at, tuple(joined(runs) for runs in ranks))


def require(axis: Axis, tp_size: int) -> None:
    """Raise unless ``axis`` can serve ``tp_size`` ranks."""
    if tp_size < 1:
        raise UsageError(f"a degree of {tp_size} makes no sense; the tensor-parallel degree is a whole number from 1")
    if not axis.serves(tp_size):
        raise UnsupportedError(
            f"{tp_size} ranks cannot share the axis '{axis.name}' ({axis.describe()}): "
            f"at most {axis.parts()} ranks can; choose a degree from 1 to {axis.parts()}"
        )
