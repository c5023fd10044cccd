"""After matching: cuts what a quantisation method stores, by the family's own table.

Each of the tensors that stand for a matrix gets the matrix's dimensions at its own ratio, and axes that carry groups,
blocks or packed integers get a step: so many units stay together on every rank. The weight, its scales and its zero
points are one cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import gcd, lcm
from typing import NamedTuple

from tpshard.axes import Axis, Dim, Heads, Padded, Segment, Units, replicated
from tpshard.errors import DamagedError, UnsupportedError, short
from tpshard.matching import Logical, Matched
from tpshard.table import Rule

from .caches import cache_rules
from .formats import IN, OUT, Entry, Flat, Member, Of
from .unpacking import Packed, Unpacked, form_of, implied, unpack

__all__ = ["pack", "unpack"]
Whole = Mapping[int, Dim]
"""The dimensions of a matrix by what they are: ``OUT``, ``IN``, ``BANK``."""


class Demand(NamedTuple):
    """So many units of an axis' view stay together, since of ``tensor`` the groups do that ``why`` tells."""

    units: int
    tensor: str
    why: str

    def told(self) -> str:
        """For messages: the tensor and its groups."""
        return f"{self.tensor} ({self.why})"


class Stretch(NamedTuple):
    """A dimension of a stored tensor, and why its groups stay whole, for messages."""

    dim: Dim
    why: str = ""


def pack(matched: Matched, unpacked: Unpacked) -> tuple[Matched, dict[Axis, str]]:
    """The rules and dimensions of the stored tensors, and for every axis what demands its step, for messages.

    Raises:
        DamagedError: a tensor has another shape than its matrix implies; names both numbers.
        UnsupportedError: groups of a vocabulary lie across its rows.
    """
    rules, dims = dict(matched.rules), dict(matched.dims)
    demands: dict[tuple[Axis, str], Demand] = {}
    known: dict[tuple[int, int, tuple[int, ...]], tuple[Rule, tuple[Dim, ...]]] = {}
    for name, packed in unpacked.packed.items():
        rule, of_matrix = rules.pop(name, None), dims.pop(name)
        whole = dict(zip(packed.order, of_matrix, strict=True))
        for member, tensor in packed.members.values():
            key = id(of_matrix), id(member), tensor.shape
            if key not in known:
                of_member = _dims(member, tensor, whole, packed, rule)
                own = tuple(stretch.dim for stretch in of_member)
                known[key] = _rule(rule, member, tensor, own, whole), own
                for stretch in of_member:
                    _collect(demands, stretch, tensor)
            of_tensor, cut = known[key]
            dims[tensor.name] = cut
            if rule is not None:
                rules[tensor.name] = of_tensor
    for name, (of_scale, cut) in cache_rules(unpacked.caches, dims).items():
        rules[name], dims[name] = of_scale, cut
    stepped, reasons = _stepped(demands)
    return replace(matched, rules=rules, dims=_with(dims, stepped)), reasons


def _rule(rule: Rule | None, member: Member, tensor: Logical, dims: tuple[Dim, ...], whole: Whole) -> Rule:
    """The rule of a member: the matrix's, under a role that says which part of it this is.

    What has the matrix's own shape and indices keeps its role.
    """
    role, block, note = ("unknown", "", "") if rule is None else (rule.role, rule.block, rule.note)
    if member.kind != "values":
        role = f"{role}:{member.kind}"
    if any(whole[dim].axes for dim in member.noted if dim in whole):
        note = member.note or note
    return Rule(tensor.name, dims, role, member.optional, block, note)


def _dims(member: Member, tensor: Logical, whole: Whole, packed: Packed, rule: Rule | None) -> list[Stretch]:
    """The member's dimensions by the first of its forms that fits."""
    form = form_of(member, tensor, packed, rule)
    if form is None:
        near = next((form for form in member.forms if len(form) == len(tensor.shape)), member.forms[0])
        stored = [*tensor.shape, *[1] * len(near)][: len(near)]
        expected = implied(near, packed.lengths, stored, rule, packed.order) or ()
        shape = [packed.lengths[dim] for dim in packed.format.dims]
        raise DamagedError(
            f"{short(tensor.name)} has the shape {list(tensor.shape)}, where {packed.format.name} of a matrix "
            f"{shape} implies {list(expected)}; config.json and the weights are not of one model"
        )
    return [_stretch(entry, length, whole) for entry, length in zip(form, tensor.shape, strict=True)]


def _stretch(entry: Entry, length: int, whole: Whole) -> Stretch:
    if isinstance(entry, Of) and entry.cut:
        return _scaled(whole[entry.dim], entry.stored, entry.per, length)
    if isinstance(entry, Flat):
        return _flat(whole[OUT], whole[IN], entry, length)
    return Stretch(replicated(length))


def _flat(out: Dim, into: Dim, flat: Flat, length: int) -> Stretch:
    """The dimension of a matrix that is stored row after row in one line."""
    if not into.axes:  # whole rows
        rows = Dim(tuple([segment._replace(size=segment.size * into.extent) for segment in out.segments]))
        return _scaled(rows, flat.stored, flat.per, length)
    if out.axes or into.extent % flat.per:
        why = f"runs of {flat.per:,} elements lie across rows of {into.extent:,}, along which it is cut"
        return Stretch(_undivided(into, length), why)
    row = _scaled(into, flat.stored, flat.per, length // out.extent)
    return row._replace(dim=row.dim * out.extent)


def _scaled(dim: Dim, stored: int, per: int, length: int) -> Stretch:
    """The dimension at a ratio: every segment with ``stored`` indices for each ``per`` of its own."""
    segments: list[Segment] = []
    for number, segment in enumerate(dim.segments):
        if number < len(dim.segments) - 1 and segment.length % per:
            why = f"groups of {per:,} indices lie across its fused parts, one of which has {segment.length:,}"
            return Stretch(_undivided(dim, length), why)
        if segment.axis is None:
            segments.append(segment._replace(size=-(-segment.size // per) * stored))
            continue
        units = per // gcd(segment.size, per)
        if segment.start % (segment.per * units):
            why = f"groups of {per:,} indices begin inside a group of another part"
            return Stretch(_undivided(dim, length), why)
        segments.append(segment._replace(size=segment.size * units // per * stored, per=segment.per * units))
    scaled = Dim(tuple(segments))
    if scaled.extent != length:
        return Stretch(_undivided(dim, length), f"the last group of {per:,} indices ends inside a unit of its axis")
    groups = -(-dim.extent // per)
    return Stretch(scaled, f"{dim.extent:,} indices in {groups:,} groups of {per:,} that stay whole")


def _undivided(dim: Dim, length: int) -> Dim:
    """A dimension whose groups allow no cut: all units of its axes are one group, so that one rank is all there is.

    Where it lies along several axes, each has one index at least.
    """
    views = {segment.axis: segment.view for segment in reversed(dim.segments) if segment.axis is not None}
    sizes = [length - len(views) + 1, *[1] * (len(views) - 1)]
    groups = [
        Segment(axis, view, 0, axis.views()[view], size, axis.views()[view])
        for (axis, view), size in zip(views.items(), sizes, strict=False)
    ]
    return Dim(tuple(groups)) if groups else replicated(length)


def _collect(demands: dict[tuple[Axis, str], Demand], stretch: Stretch, tensor: Logical) -> None:
    for axis, view, per in dict.fromkeys((s.axis, s.view, s.per) for s in stretch.dim.segments if s.per > 1):
        assert axis is not None
        if isinstance(axis, Padded) and per == axis.count:
            raise UnsupportedError(
                f"{short(tensor.name)}: {stretch.why}; no degree above 1 works. Use a checkpoint in which this matrix "
                "is not quantised"
            )
        before = demands.get((axis, view))
        units = per if before is None else lcm(before.units, per)
        if not isinstance(axis, Padded):
            units = min(units, axis.views()[view])
        if before is None or units > before.units:
            demands[axis, view] = Demand(units, tensor.name, stretch.why)


def _stepped(demands: Mapping[tuple[Axis, str], Demand]) -> tuple[dict[Axis, Axis], dict[Axis, str]]:
    """The axes with the steps that are demanded of them, and by what."""
    stepped: dict[Axis, Axis] = {}
    reasons: dict[Axis, tuple[int, str]] = {}
    for (axis, view), demand in demands.items():
        old = stepped.get(axis, axis)
        if isinstance(old, Heads):
            units = demand.units * (old.group if view == "kv" else 1)
            new: Axis = replace(old, step=min(lcm(old.step, units), old.query_heads))
        elif isinstance(old, Padded):
            units = demand.units
            new = replace(old, multiple=lcm(old.multiple, units))
        else:
            assert isinstance(old, Units)
            units = demand.units
            new = replace(old, step=lcm(old.step, units))
        stepped[axis] = new
        if axis not in reasons or units > reasons[axis][0]:
            reasons[axis] = units, demand.told()
    return stepped, {stepped[axis]: text for axis, (_, text) in reasons.items()}


def _with(dims: Mapping[str, tuple[Dim, ...]], stepped: Mapping[Axis, Axis]) -> dict[str, tuple[Dim, ...]]:
    """All dimensions with the new axes in place of the old; tensors of one rule keep sharing theirs."""
    if not stepped:
        return dict(dims)
    known: dict[int, tuple[Dim, ...]] = {}
    return {name: known.get(id(of)) or known.setdefault(id(of), _renewed(of, stepped)) for name, of in dims.items()}


def _renewed(dims: Iterable[Dim], stepped: Mapping[Axis, Axis]) -> tuple[Dim, ...]:
    return tuple(
        Dim(tuple([s if s.axis is None else s._replace(axis=stepped.get(s.axis, s.axis)) for s in dim.segments]))
        for dim in dims
    )
