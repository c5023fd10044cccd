"""Cuts what a quantisation method stores, by the family's own table.

Before matching, the tensors that stand for a matrix are replaced by the matrix itself, in name and shape: the
family's table then speaks of it as ever, and misses or refuses what it would without quantisation. After it, each
of the tensors gets the matrix's dimensions at its own ratio, and axes that carry groups, blocks or packed integers
get a step: so many units stay together on every rank. The weight, its scales and its zero points are one cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from tpshard.errors import DamagedError, UnsupportedError, short
from tpshard.matching import Logical, Matched
from tpshard.partition import Axis, Dim, Heads, Padded, Segment, Units, replicated
from tpshard.table import Rule

from .formats import Form, Format, Member, Of


class Packed(NamedTuple):
    """The tensors that stand for one matrix."""

    format: Format
    weight: Logical
    members: Mapping[str, tuple[Member, Logical]]  # by name


@dataclass(frozen=True)
class Unpacked:
    """A checkpoint's tensors with every quantised matrix in place of what stands for it."""

    tensors: tuple[Logical, ...]
    packed: Mapping[str, Packed]  # by the matrix's name


class Demand(NamedTuple):
    """So many units of an axis' view stay together, since of ``tensor`` each group of ``per`` indices does."""

    units: int
    tensor: str
    length: int
    per: int

    def told(self) -> str:
        """For messages: the tensor and its groups."""
        groups = -(-self.length // self.per)
        return f"{self.tensor} ({self.length:,} indices in {groups:,} groups of {self.per:,} that stay whole)"


# -- before matching ---------------------------------------------------------------------------------


def unpack(tensors: Sequence[Logical], formats: Sequence[Format]) -> Unpacked:
    """Put every matrix in place of the tensors that stand for it.

    Raises:
        DamagedError: a tensor of a format lacks another that belongs to it, or has no shape that the format can have.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    packed: dict[str, Packed] = {}
    taken: dict[str, str] = {}  # member -> matrix
    for tensor in tensors:
        for fmt in formats:
            stem = _stem(tensor, fmt)
            if stem is None:
                continue
            shape = fmt.shape(tensor.shape)
            if shape is None:
                continue
            weight = Logical(stem + fmt.weight, tensor.dtype, shape)
            members = _members(stem, fmt, by_name)
            packed[weight.name] = Packed(fmt, weight, members)
            taken |= dict.fromkeys(members, weight.name)
            break
    out: list[Logical] = []
    placed: set[str] = set()
    for tensor in tensors:
        matrix = taken.get(tensor.name)
        if matrix is None:
            out.append(tensor)
        elif matrix not in placed:
            placed.add(matrix)
            out.append(packed[matrix].weight)
    return Unpacked(tuple(out), packed)


def _stem(tensor: Logical, fmt: Format) -> str | None:
    """What comes before the suffix of the format's first member, None where the tensor is none of it."""
    first = fmt.members[0]
    if not tensor.name.endswith(first.suffix) or (fmt.dtypes and tensor.dtype not in fmt.dtypes):
        return None
    return tensor.name.removesuffix(first.suffix)


def _members(stem: str, fmt: Format, by_name: Mapping[str, Logical]) -> dict[str, tuple[Member, Logical]]:
    found = {}
    for member in fmt.members:
        tensor = by_name.get(stem + member.suffix)
        if tensor is not None:
            found[tensor.name] = member, tensor
        elif not member.optional:
            raise DamagedError(
                f"{stem}{fmt.members[0].suffix} is {fmt.name}, and {stem}{member.suffix}, which belongs to it, is "
                "missing from the weights; download or copy the checkpoint again"
            )
    return found


# -- after matching ----------------------------------------------------------------------------------


def pack(matched: Matched, unpacked: Unpacked) -> tuple[Matched, dict[Axis, str]]:
    """The rules and dimensions of the stored tensors, and for every axis what demands its step, for messages.

    Raises:
        DamagedError: a tensor has another shape than its matrix implies; names both numbers.
        UnsupportedError: groups of a tensor lie across parts of a fused matrix.
    """
    rules, dims = dict(matched.rules), dict(matched.dims)
    demands: dict[tuple[Axis, str], Demand] = {}
    known: dict[tuple[int, int, tuple[int, ...]], tuple[Rule, tuple[Dim, ...]]] = {}
    for name, packed in unpacked.packed.items():
        rule, whole = rules.pop(name, None), dims.pop(name)
        for member, tensor in packed.members.values():
            key = id(whole), id(member), tensor.shape
            if key not in known:
                of_member = _dims(member, tensor, whole, packed)
                own = _rule(rule, member, tensor, of_member)
                known[key] = own, tuple(dim for dim, _ in of_member)
                for dim, entry in of_member:
                    _collect(demands, dim, entry, tensor)
            own, cut = known[key]
            dims[tensor.name] = cut
            if rule is not None:
                rules[tensor.name] = own
    stepped, reasons = _stepped(demands)
    return replace(matched, rules=rules, dims=_with(dims, stepped)), reasons


def _rule(rule: Rule | None, member: Member, tensor: Logical, dims: Sequence[tuple[Dim, object]]) -> Rule:
    """The rule of a member: the matrix's, under a role that says which part of it this is."""
    role = f"{rule.role}:{member.kind}" if rule is not None else "unknown"
    lengths = tuple(dim for dim, _ in dims)
    return Rule(tensor.name, lengths, role, member.optional, rule.block if rule is not None else "", member.note)


def _dims(
    member: Member, tensor: Logical, whole: Sequence[Dim], packed: Packed
) -> list[tuple[Dim, Of | int | None]]:
    """The member's dimensions by the first of its forms that fits."""
    for form in member.forms:
        if len(form) == len(tensor.shape) and _implied(form, packed.weight.shape, tensor.shape) == tensor.shape:
            return [
                (_scaled(whole[entry.dim], entry, tensor.name) if isinstance(entry, Of) else replicated(length), entry)
                for entry, length in zip(form, tensor.shape, strict=True)
            ]
    form = next((form for form in member.forms if len(form) == len(tensor.shape)), member.forms[0])
    implied = list(_implied(form, packed.weight.shape, tensor.shape))
    raise DamagedError(
        f"{short(tensor.name)} has the shape {list(tensor.shape)}, where {packed.format.name} of a matrix "
        f"{list(packed.weight.shape)} implies {implied}; config.json and the weights are not of one model"
    )


def _implied(form: Form, weight: Sequence[int], stored: Sequence[int]) -> tuple[int, ...]:
    lengths = [*stored, *[1] * len(form)]
    return tuple(
        entry.length(weight[entry.dim]) if isinstance(entry, Of) else lengths[at] if entry is None else entry
        for at, entry in enumerate(form)
    )


def _scaled(dim: Dim, of: Of, tensor: str) -> Dim:
    """The dimension at a ratio: every segment with ``stored`` indices for each ``per`` of its own."""
    segments: list[Segment] = []
    for number, segment in enumerate(dim.segments):
        is_last = number == len(dim.segments) - 1
        if not is_last and segment.length * of.stored % of.per:
            raise UnsupportedError(
                f"{short(tensor)}: groups of {of.per} indices lie across the parts of the fused matrix, one of which "
                f"has {segment.length:,}; this cannot be cut. Use the checkpoint in its original precision"
            )
        ratio = Fraction(segment.size * of.stored, of.per * segment.per)
        if segment.axis is None:
            segments.append(segment._replace(size=of.length(segment.size)))
            continue
        segments.append(segment._replace(size=ratio.numerator, per=ratio.denominator))
    return Dim(tuple(segments))


def _collect(demands: dict[tuple[Axis, str], Demand], dim: Dim, entry: object, tensor: Logical) -> None:
    for segment in dim.segments:
        axis = segment.axis
        if axis is None or segment.per == 1 or not isinstance(entry, Of):
            continue
        if segment.start % segment.per:
            raise UnsupportedError(
                f"{short(tensor.name)}: its groups of {segment.per} begin inside a group of another part of the "
                "matrix; this cannot be cut. Use the checkpoint in its original precision"
            )
        key = axis, segment.view
        before = demands.get(key)
        units = segment.per if before is None else lcm(before.units, segment.per)
        if before is None or units > before.units:
            whole = dim.extent * entry.per // entry.stored
            demands[key] = Demand(units, tensor.name, whole, entry.per // entry.stored or 1)


def _stepped(demands: Mapping[tuple[Axis, str], Demand]) -> tuple[dict[Axis, Axis], dict[Axis, str]]:
    """The axes with the steps that are demanded of them, and by what."""
    stepped: dict[Axis, Axis] = {}
    reasons: dict[Axis, tuple[int, str]] = {}
    for (axis, view), demand in demands.items():
        old = stepped.get(axis, axis)
        if isinstance(old, Heads):
            units = demand.units * (old.group if view == "kv" else 1)
            new: Axis = replace(old, step=lcm(old.step, units))
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
