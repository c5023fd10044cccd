"""Axes, and how their units are dealt to the ranks of a tensor-parallel group; dimensions along them.

An *axis* (feed-forward width, attention heads, vocabulary) is cut once, whatever number of tensors
lie along it. It has one or more *views*, the units that tensors refer to: attention has the views
``query`` and ``kv``. Units are dealt in order; where they do not divide, the first ranks take one
more. A dimension of a tensor is then a sequence of segments, each a run of some view's units; the
order of the segments is the stored order, so every fusion is data. What the ranks store of a dimension
follows from it in :mod:`.partition`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd
from typing import NamedTuple, TypeAlias, TypeVar

from .errors import LayoutError, UnsupportedError
from .intervals import Bounds, dealt

_Axis = TypeVar("_Axis", bound="Axis")

MOST_GROUPS = 2**14  # a guard against hostile configs: models have at most a few hundred


@dataclass(frozen=True)
class Axis:
    """Something that is cut once for all tensors along it. Subclasses say how.

    ``step`` units must stay together (a quantisation group, an FP8 block, a packing factor). With ``or_whole``
    the axis is one that a rank can do without cutting (a tower beside a larger model): more ranks than it has
    parts hold all of it each.
    """

    name: str

    kind = "axis"
    or_whole = False  # whether more ranks than parts are served by holding the axis whole on every rank

    def renamed(self: _Axis, name: str, or_whole: bool) -> _Axis:
        """The same axis under another name; with ``or_whole`` one that more ranks than parts hold whole."""
        return replace(self, name=name, or_whole=True) if or_whole else replace(self, name=name)  # type: ignore[call-arg]

    def views(self) -> dict[str, int]:
        """Unit count of every view."""
        raise LayoutError(f"axis {self.name} has no views")

    def parts(self) -> int:
        """The most ranks that this axis can serve."""
        raise LayoutError(f"axis {self.name} has no parts")

    def serves(self, tp_size: int) -> bool:
        """Whether so many ranks can have the axis, each a part of it or, where the axis allows it, all of it."""
        return self.or_whole or tp_size <= self.parts()

    def is_whole(self, tp_size: int) -> bool:
        """Whether every rank holds the whole axis since there are more ranks than parts."""
        return self.or_whole and tp_size > self.parts()

    def bounds(self, view: str, tp_size: int) -> tuple[Bounds, ...]:
        """Units ``[start, stop)`` of ``view`` on every rank; ranks may share units (replication)."""
        raise LayoutError(f"axis {self.name} cannot be dealt")

    def padding(self, tp_size: int) -> tuple[int, ...]:
        """Padding units on every rank."""
        return (0,) * tp_size

    def is_equal(self, tp_size: int) -> bool:
        """Whether every rank of ``tp_size`` holds the same number of units of every view."""
        if not 1 <= tp_size <= self.parts():
            return False
        for view in self.views():
            sizes = {
                stop - start + pad
                for (start, stop), pad in zip(self.bounds(view, tp_size), self.padding(tp_size), strict=True)
            }
            if len(sizes) != 1:
                return False
        return True

    def noun_of(self, view: str) -> str:
        """What the units of a view are called, for messages: ``kv heads``."""
        return f"{view} units"

    def describe(self) -> str:
        """The axis in words, for messages: ``6 query heads over 2 kv heads``."""
        return ", ".join(f"{count} {view} units" for view, count in self.views().items())


@dataclass(frozen=True)
class Units(Axis):
    """An axis of ``count`` like units: feed-forward channels, heads that share nothing, experts."""

    count: int
    step: int = 1
    noun: str = "units"
    or_whole: bool = False

    kind = "units"

    def views(self) -> dict[str, int]:
        return {"unit": self.count}

    def parts(self) -> int:
        return -(-self.count // self.step)

    def bounds(self, view: str, tp_size: int) -> tuple[Bounds, ...]:
        if self.is_whole(tp_size):
            return ((0, self.count),) * tp_size
        return tuple(
            (min(start * self.step, self.count), min(stop * self.step, self.count))
            for start, stop in dealt(self.parts(), tp_size)
        )

    def is_equal(self, tp_size: int) -> bool:
        if self.is_whole(tp_size):
            return True
        return tp_size == 1 or (tp_size >= 1 and self.count % (self.step * tp_size) == 0)

    def noun_of(self, view: str) -> str:
        return self.noun

    def describe(self) -> str:
        grouped = f" in {self.parts()} groups of {self.step} that must stay whole" if self.step > 1 else ""
        return f"{self.count} {self.noun}{grouped}"

    def each(self, size: int = 1) -> Dim:
        """A dimension that stores ``size`` indices for every unit, in order."""
        return self.run(0, self.count, size)

    def run(self, start: int, stop: int, size: int = 1) -> Dim:
        """A dimension that stores ``size`` indices for each of the units ``[start, stop)``, in order.

        Sums of runs are fusions by blocks of units: CodeGen's ``[block][q v k][heads of the block][d]``.
        """
        return Dim((Segment(self, "unit", start, stop, size),))


@dataclass(frozen=True)
class Heads(Axis):
    """Query heads in groups that share one KV head, cut as one decision.

    A rank holds whole KV groups, or a part of one group with a copy of its KV head; it never
    straddles two groups of which it holds only parts. Mamba-2 heads and their B/C groups are the
    same thing. ``step`` query heads must stay together.

    Raises:
        UnsupportedError: the query heads are not a multiple of the KV heads.
    """

    query_heads: int
    kv_heads: int
    step: int = 1
    noun: str = "query heads"
    group_noun: str = "kv heads"
    or_whole: bool = False

    kind = "heads"

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.query_heads < 1 or self.query_heads % self.kv_heads:
            raise UnsupportedError(
                f"{self.query_heads} {self.noun} cannot be grouped over {self.kv_heads} {self.group_noun}; "
                "correct the counts in config.json"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    def views(self) -> dict[str, int]:
        return {"query": self.query_heads, "kv": self.kv_heads}

    def _together(self) -> int:
        """KV groups that make up a whole number of steps."""
        return self.step // gcd(self.step, self.group)

    def _bundles(self) -> int:
        """Indivisible bundles of whole KV groups; the last may be short."""
        return -(-self.kv_heads // self._together())

    def parts(self) -> int:
        if self.group % self.step == 0:
            return self.query_heads // self.step
        return self._bundles()

    def bounds(self, view: str, tp_size: int) -> tuple[Bounds, ...]:
        if self.is_whole(tp_size):
            return ((0, self.views()[view]),) * tp_size
        query = _query_bounds(self, tp_size)
        if view == "query":
            return query
        return tuple((start // self.group, -(-stop // self.group)) for start, stop in query)

    def is_equal(self, tp_size: int) -> bool:
        if self.is_whole(tp_size):
            return True
        if not 1 <= tp_size <= self.parts():
            return False
        if tp_size <= self._bundles():
            return tp_size == 1 or self.kv_heads % (self._together() * tp_size) == 0
        return tp_size % self.kv_heads == 0 and self.query_heads % (self.step * tp_size) == 0

    def noun_of(self, view: str) -> str:
        return self.noun if view == "query" else self.group_noun

    def describe(self) -> str:
        grouped = f" in runs of {self.step} that must stay whole" if self.step > 1 else ""
        return f"{self.query_heads} {self.noun}{grouped} over {self.kv_heads} {self.group_noun}"

    def query(self, size: int) -> Dim:
        """A dimension with ``size`` indices for every query head."""
        return Dim((Segment(self, "query", 0, self.query_heads, size),))

    def kv(self, size: int) -> Dim:
        """A dimension with ``size`` indices for every KV head."""
        return Dim((Segment(self, "kv", 0, self.kv_heads, size),))

    def kv_run(self, start: int, stop: int, size: int) -> Dim:
        """A dimension with ``size`` indices for each of the KV heads ``[start, stop)``: a part of them stored apart.

        Zaya keeps one half of the KV heads' values in one matrix, and the other in another.
        """
        return Dim((Segment(self, "kv", start, stop, size),))

    def grouped(self, query: int, *kv: int) -> Dim:
        """A dimension that stores, group after group, its query heads and then its KV parts.

        ``query`` indices a query head, then for each of ``kv`` so many indices of the group's KV
        head: ``grouped(d, d, d)`` is Falcon's ``[group][q ... q k v][d]`` and, with one query head a
        group, GPT-NeoX's ``[head][q k v][d]``.

        Raises:
            UnsupportedError: more groups than any model has; each is a segment of its own.
        """
        if self.kv_heads > MOST_GROUPS:
            raise UnsupportedError(
                f"{self.kv_heads} {self.group_noun} stored group by group are more than the {MOST_GROUPS} that are "
                "supported; correct the counts in config.json"
            )
        segments: list[Segment] = []
        for group in range(self.kv_heads):
            segments.append(Segment(self, "query", group * self.group, (group + 1) * self.group, query))
            segments += [Segment(self, "kv", group, group + 1, size) for size in kv]
        return Dim(tuple(segments))


@lru_cache(maxsize=4096)
def _query_bounds(heads: Heads, tp_size: int) -> tuple[Bounds, ...]:
    bundles = heads._bundles()
    if tp_size <= bundles:
        size = heads._together() * heads.group
        return tuple(
            (min(start * size, heads.query_heads), min(stop * size, heads.query_heads))
            for start, stop in dealt(bundles, tp_size)
        )
    # More ranks than groups: every group gets some ranks, and deals its own query heads to them.
    out: list[Bounds] = []
    for group, (first, last) in enumerate(dealt(tp_size, heads.kv_heads)):
        base = group * heads.group
        for start, stop in dealt(heads.group // heads.step, last - first):
            out.append((base + start * heads.step, base + stop * heads.step))
    return tuple(out)


@dataclass(frozen=True)
class Padded(Axis):
    """An axis that is padded with zeros to a multiple of the degree: the vocabulary.

    Every rank stores ``ceil(count / tp_size)`` units, rounded up to ``multiple``; the last ones hold
    the padding. Padding is a fill, not an index: merge and reshard take it off again.
    """

    count: int
    multiple: int = 1
    noun: str = "vocabulary rows"

    kind = "padded"

    def renamed(self, name: str, or_whole: bool) -> Padded:
        """The same axis under another name; it has a part for more ranks than any model is cut into."""
        return replace(self, name=name)

    def views(self) -> dict[str, int]:
        return {"unit": self.count}

    def parts(self) -> int:
        return self.count

    def _each(self, tp_size: int) -> int:
        return -(-self.count // (tp_size * self.multiple)) * self.multiple

    def bounds(self, view: str, tp_size: int) -> tuple[Bounds, ...]:
        each = self._each(tp_size)
        return tuple((min(r * each, self.count), min((r + 1) * each, self.count)) for r in range(tp_size))

    def padding(self, tp_size: int) -> tuple[int, ...]:
        each = self._each(tp_size)
        return tuple(each - (stop - start) for start, stop in self.bounds("unit", tp_size))

    def is_equal(self, tp_size: int) -> bool:
        return 1 <= tp_size <= self.count

    def noun_of(self, view: str) -> str:
        return self.noun

    def describe(self) -> str:
        return f"{self.count} {self.noun}"

    def each(self, size: int = 1) -> Dim:
        """A dimension that stores ``size`` indices for every unit, padding units last."""
        return Dim((Segment(self, "unit", 0, self.count, size),))


class Segment(NamedTuple):
    """``size`` stored indices for every ``per`` units ``[start, stop)`` of an axis' view, or ``size`` whole ones.

    With ``axis`` None every rank holds all ``size`` indices. ``per`` is more than 1 where several units share stored
    indices (a scale for a group of channels); ranks then hold whole groups, which the axis' ``step`` sees to, and
    the last group of the segment may be short.
    """

    axis: Axis | None
    view: str
    start: int
    stop: int
    size: int
    per: int = 1

    @property
    def length(self) -> int:
        return self.size if self.axis is None else -(-(self.stop - self.start) // self.per) * self.size


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor as a sequence of segments, in stored order.

    ``a + b`` stores b after a; ``a * 2`` stores a twice (``[gate; up]``).
    """

    segments: tuple[Segment, ...]

    def __add__(self, other: Dim) -> Dim:
        return Dim(self.segments + other.segments)

    def __mul__(self, times: int) -> Dim:
        return Dim(self.segments * times)

    @property
    def extent(self) -> int:
        return sum(segment.length for segment in self.segments)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes along which this dimension is cut, each once, in order."""
        return tuple(dict.fromkeys(s.axis for s in self.segments if s.axis is not None))


def replicated(extent: int) -> Dim:
    """A dimension, or a segment of one, that every rank holds whole."""
    return Dim((Segment(None, "", 0, 1, extent),))


AnyDim: TypeAlias = Dim | int
