"""Joins the holders of one logical tensor in a source layout with those in a target layout.

The result is a list of :class:`Strips` without files or offsets of stored tensors: tensors of one
geometry share it. Proven here for every geometry: each index that a target stores comes from exactly
one source or is padding, and each index that a source stores is copied, compared, or checked to be
zero padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from .errors import LayoutError
from .intervals import PAD, Run, Runs
from .layout import Stored
from .routing import Copy, Fill, Route, Same, Zero


class Holder(NamedTuple):
    """Where one rank keeps its part of a logical tensor, inside a stored tensor.

    ``runs`` and ``at`` have one entry a dimension: which indices, and where they start in the stored
    tensor, whose shape is ``shape``.
    """

    runs: tuple[Runs, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]


class StripShape(NamedTuple):
    """A strip before it is placed: ends are (holder, byte offset in the stored tensor, bytes a row)."""

    rows: int
    sources: tuple[tuple[int, int, int], ...]
    targets: tuple[tuple[int, int, int], ...]
    route: Route


class _Stretch(NamedTuple):
    """Indices ``[start, start + length)`` of a dimension and the holders that store them, each with where."""

    start: int
    length: int
    holders: tuple[tuple[int, int], ...]  # (holder, position in its stored dimension)


def holders_of(stored: Stored, piece: int, ranks: int) -> list[tuple[int, Holder]]:
    """The ranks that hold one piece of a stored tensor, with the place of the piece in it."""
    out = []
    part = stored.pieces[piece].cut
    for rank in range(ranks):
        if part.shapes[rank] is None:
            continue
        shape = stored.shape(rank)
        if shape is None:
            raise LayoutError(f"{stored.name}: rank {rank} holds only some of its pieces")
        at = [0] * len(shape)
        for earlier in stored.pieces[:piece]:
            before = earlier.cut.shapes[rank]
            at[stored.dim] += before[stored.dim] if before else 0
        out.append((rank, Holder(tuple(dim.ranks[rank] for dim in part.dims), shape, tuple(at))))
    return out


@lru_cache(maxsize=65536)
def joined_strips(
    shape: tuple[int, ...], bits: int, sources: tuple[Holder, ...], targets: tuple[Holder, ...]
) -> tuple[StripShape, ...]:
    """All strips that carry a tensor of ``shape`` and ``bits`` an element from its sources to its targets.

    Raises:
        LayoutError: an index has no source, a source is used by nobody, a cut falls inside a byte,
            or more than two dimensions are cut.
    """
    if not sources:
        raise LayoutError("no source rank holds the tensor")
    if not targets:
        raise LayoutError("no target rank takes the tensor")
    if prod(shape) == 0 and all(prod(h.shape) == 0 for h in (*sources, *targets)):
        return ()
    holders = (*sources, *targets)
    cut = [d for d, extent in enumerate(shape) if any(not _is_whole(holder, d, extent) for holder in holders)]
    if len(cut) > 2:
        raise LayoutError(f"dimensions {cut} are cut; at most two may be")
    if not cut:
        nbytes = _bytes(prod(shape) * bits)
        route = Route(
            tuple(Copy(0, 0, t, 0, nbytes) for t in range(len(targets))),
            same=tuple(Same(0, 0, s, 0, nbytes) for s in range(1, len(sources))),
        )
        ends = tuple((s, 0, nbytes) for s in range(len(sources)))
        return (StripShape(1, ends, tuple((t, 0, nbytes) for t in range(len(targets))), _used(route)),)
    inner = cut[-1]
    after = prod(shape[inner + 1 :]) * bits
    if len(cut) == 1:
        rows = prod(shape[:inner])
        return tuple(_strip(rows, [0] * len(sources), [0] * len(targets), inner, after, sources, targets))
    return tuple(_two_cuts(shape, cut[0], inner, after, sources, targets))


def _is_whole(holder: Holder, dim: int, extent: int) -> bool:
    return holder.shape[dim] == extent and holder.runs[dim] == (((0, extent),) if extent else ())


def _two_cuts(
    shape: tuple[int, ...], outer: int, inner: int, after: int, sources: Sequence[Holder], targets: Sequence[Holder]
) -> list[StripShape]:
    """One strip for each stretch of the outer cut (and each index before it): below it one cut is left."""
    between = prod(shape[outer + 1 : inner])
    strips: list[StripShape] = []
    stretches = _stretches([h.runs[outer] for h in sources], [h.at[outer] for h in sources])
    aims = _stretches([h.runs[outer] for h in targets], [h.at[outer] for h in targets])
    for before in range(prod(shape[:outer])):
        for _start, length, froms, tos in _common(stretches, aims, shape[outer]):
            strips += _strip(
                length * between,
                _row_starts(froms, sources, outer, before, between),
                _row_starts(tos, targets, outer, before, between),
                inner,
                after,
                sources,
                targets,
            )
        strips += _outer_padding(outer, before, between, inner, after, sources, targets)
    return strips


def _row_starts(
    members: Sequence[tuple[int, int]], holders: Sequence[Holder], outer: int, before: int, between: int
) -> list[int | None]:
    """For each holder the first row of the stretch in its stored matrix, None where it does not hold it."""
    starts: list[int | None] = [None] * len(holders)
    for holder, position in members:
        starts[holder] = (before * holders[holder].shape[outer] + position) * between
    return starts


def _outer_padding(
    outer: int, before: int, between: int, inner: int, after: int, sources: Sequence[Holder], targets: Sequence[Holder]
) -> list[StripShape]:
    """Whole rows of padding along the outer cut: zeros to write, zeros to check."""
    strips = []
    for is_target, holders in ((False, sources), (True, targets)):
        for number, holder in enumerate(holders):
            width = _bytes(holder.shape[inner] * after)
            at = holder.at[outer]
            for run in holder.runs[outer]:
                if run.start == PAD:
                    first = (before * holder.shape[outer] + at) * between
                    end = ((number, first * width, width),)
                    rows = run.length * between
                    if is_target:
                        strips.append(StripShape(rows, (), end, _used(Route((), fills=(Fill(0, 0, width),)))))
                    else:
                        strips.append(StripShape(rows, end, (), _used(Route((), zeros=(Zero(0, 0, width),)))))
                at += run.length
    return strips


def _strip(
    rows: int,
    source_rows: Sequence[int | None],
    target_rows: Sequence[int | None],
    dim: int,
    after: int,
    sources: Sequence[Holder],
    targets: Sequence[Holder],
) -> list[StripShape]:
    """The strip of one cut dimension among the holders that are present in these rows."""
    froms = [s for s, start in enumerate(source_rows) if start is not None]
    tos = [t for t, start in enumerate(target_rows) if start is not None]
    route = _route(
        tuple(sources[s].runs[dim] for s in froms),
        tuple(sources[s].at[dim] for s in froms),
        tuple(targets[t].runs[dim] for t in tos),
        tuple(targets[t].at[dim] for t in tos),
        after,
    )

    def ends(
        members: Sequence[int], starts: Sequence[int | None], holders: Sequence[Holder]
    ) -> tuple[tuple[int, int, int], ...]:
        out = []
        for member in members:
            start = starts[member]
            width = _bytes(holders[member].shape[dim] * after)
            out.append((member, (start or 0) * width, width))
        return tuple(out)

    return [StripShape(rows, ends(froms, source_rows, sources), ends(tos, target_rows, targets), route)]


@lru_cache(maxsize=65536)
def _route(
    source_runs: tuple[Runs, ...],
    source_at: tuple[int, ...],
    target_runs: tuple[Runs, ...],
    target_at: tuple[int, ...],
    unit: int,
) -> Route:
    """The column map of one cut dimension whose indices take ``unit`` bits each."""
    held = [run for runs in (*source_runs, *target_runs) for run in runs if run.start != PAD]
    extent = max((run.start + run.length for run in held), default=0)
    copies: list[Copy] = []
    same: list[Same] = []
    sources = _stretches(source_runs, source_at)
    targets = _stretches(target_runs, target_at)
    for _start, length, froms, tos in _common(sources, targets, extent):
        size = _bytes(length * unit)
        first, first_at = froms[0]
        for other, other_at in froms[1:]:
            same.append(Same(first, _bytes(first_at * unit), other, _bytes(other_at * unit), size))
        for target, at in tos:
            copies.append(Copy(first, _bytes(first_at * unit), target, _bytes(at * unit), size))
    fills = [Fill(t, _bytes(at * unit), _bytes(n * unit)) for t, at, n in _paddings(target_runs, target_at)]
    zeros = [Zero(s, _bytes(at * unit), _bytes(n * unit)) for s, at, n in _paddings(source_runs, source_at)]
    return _used(Route(_fused(copies), tuple(fills), tuple(same), tuple(zeros)))


@lru_cache(maxsize=65536)
def _used(route: Route) -> Route:
    """One object for one route: executors cache by identity."""
    return route


def _fused(copies: Sequence[Copy]) -> tuple[Copy, ...]:
    """Copies by target and position, neighbours that continue each other made one."""
    out: list[Copy] = []
    for copy in sorted(copies, key=lambda c: (c.target, c.target_at)):
        last = out[-1] if out else None
        if (
            last is not None
            and last.source == copy.source
            and last.target == copy.target
            and last.source_at + last.length == copy.source_at
            and last.target_at + last.length == copy.target_at
        ):
            out[-1] = last._replace(length=last.length + copy.length)
        else:
            out.append(copy)
    return tuple(out)


def _paddings(runs: Sequence[Runs], at: Sequence[int]) -> list[tuple[int, int, int]]:
    """(holder, stored position, length) of all padding."""
    out = []
    for holder, (held, position) in enumerate(zip(runs, at, strict=True)):
        for run in held:
            if run.start == PAD:
                out.append((holder, position, run.length))
            position += run.length
    return out


def _stretches(runs: Sequence[Runs], at: Sequence[int]) -> list[_Stretch]:
    """The dimension cut at every boundary of every holder, with the holders of each stretch."""
    placed: list[tuple[Run, int, int]] = []  # run, holder, stored position
    for holder, (held, position) in enumerate(zip(runs, at, strict=True)):
        for run in held:
            if run.start != PAD:
                placed.append((run, holder, position))
            position += run.length
    edges = sorted({edge for run, _, _ in placed for edge in (run.start, run.start + run.length)})
    opening: dict[int, list[tuple[Run, int, int]]] = {}
    for item in placed:
        opening.setdefault(item[0].start, []).append(item)
    out: list[_Stretch] = []
    active: list[tuple[Run, int, int]] = []
    for low, high in pairwise(edges):
        active = [item for item in active if item[0].start + item[0].length > low] + opening.get(low, [])
        if active:
            held_by = sorted((holder, position + low - run.start) for run, holder, position in active)
            out.append(_Stretch(low, high - low, tuple(held_by)))
    return out


def _common(
    sources: Sequence[_Stretch], targets: Sequence[_Stretch], extent: int
) -> list[tuple[int, int, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]]:
    """Stretches on which both sides are constant: (start, length, source places, target places).

    Raises:
        LayoutError: an index is held on one side only.
    """
    out = []
    s = t = at = 0
    while s < len(sources) and t < len(targets):
        source, target = sources[s], targets[t]
        if source.start > at or target.start > at:
            break
        stop = min(source.start + source.length, target.start + target.length)
        froms = tuple((h, p + at - source.start) for h, p in source.holders)
        tos = tuple((h, p + at - target.start) for h, p in target.holders)
        out.append((at, stop - at, froms, tos))
        at = stop
        s += stop == source.start + source.length
        t += stop == target.start + target.length
    if s < len(sources) or t < len(targets) or at != extent:
        held = sources[s : s + 1] and sources[s].start <= at
        side = "no target rank takes" if held else "no source rank holds"
        raise LayoutError(f"{side} index {at} of {extent}")
    return out


def _bytes(bits: int) -> int:
    if bits % 8:
        raise LayoutError(f"a cut at bit {bits} falls inside a byte; choose a degree whose cuts fall on whole bytes")
    return bits // 8
