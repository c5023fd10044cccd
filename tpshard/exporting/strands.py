"""The strands of a dimension: what a fusion twisted together, each by itself.

``[q q k v]`` of every KV group is three strands, so are ``[Q; K; V]`` in three blocks and ``[q k v]`` of every
head; ``[gate; up]`` is two. An engine that stores them in another order takes them apart and lays them anew.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tpshard.axes import Axis, Dim
from tpshard.intervals import Run, Runs, joined


class Span(NamedTuple):
    """Units ``[start, stop)`` of a strand, stored from index ``at`` of the dimension on."""

    start: int
    stop: int
    at: int


class Strand(NamedTuple):
    """Some view's units, once each and in order, and where the dimension stores them.

    ``size`` indices for every ``per`` units. With ``axis`` None it is a stretch that no axis cuts, one unit.
    """

    axis: Axis | None
    view: str
    size: int
    per: int
    spans: tuple[Span, ...]

    @property
    def units(self) -> int:
        """How many units it holds."""
        return sum(span.stop - span.start for span in self.spans)

    def runs(self, start: int, stop: int) -> Runs:
        """Where the units ``[start, stop)`` are stored, in the order of the units."""
        out = []
        for span in self.spans:
            low, high = max(start, span.start), min(stop, span.stop)
            if high > low:
                first, last = (low - span.start) // self.per, -(-(high - span.start) // self.per)
                out.append(Run(span.at + first * self.size, (last - first) * self.size))
        return joined(out)

    @property
    def all(self) -> Runs:
        """Where all its units are stored."""
        return self.runs(self.spans[0].start, self.spans[-1].stop)


@lru_cache(maxsize=4096)
def strands_of(dim: Dim) -> tuple[Strand, ...]:
    """The strands of a dimension, in the order in which they begin."""
    found: list[Strand] = []
    at = 0
    for segment in dim.segments:
        if segment.axis is None:
            found.append(Strand(None, "", segment.size, 1, (Span(0, 1, at),)))
        else:
            kind = (segment.axis, segment.view, segment.size, segment.per)
            span = Span(segment.start, segment.stop, at)
            for number, strand in enumerate(found):  # the first that this goes on with
                if strand[:4] == kind and strand.spans[-1].stop == segment.start:
                    found[number] = strand._replace(spans=(*strand.spans, span))
                    break
            else:
                found.append(Strand(*kind, (span,)))
        at += segment.length
    return tuple(found)
