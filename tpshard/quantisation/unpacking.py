"""Before matching: every quantised matrix in place of the tensors that stand for it.

A family's table then speaks of the matrix as ever, in name and shape, and misses or refuses what it would without
quantisation. Which dimension of a matrix are its outputs, the table tells: most are ``[out, in]``, those of GPT-2
and some banks of experts ``[in, out]``, and methods keep to their own order either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpshard.axes import Dim
from tpshard.errors import DamagedError
from tpshard.matching import Logical, known_names
from tpshard.roles import EMBED, ROW
from tpshard.table import Rule, Table

from .caches import is_cache_scale
from .formats import IN, OUT, Flat, Form, Format, Member, Of, Parts, inferred

Lengths = Mapping[int, int]
"""The length of every dimension of a matrix."""


class Packed(NamedTuple):
    """The tensors that stand for one matrix; ``order`` are its dimensions as the table has them."""

    format: Format
    weight: Logical
    members: Mapping[str, tuple[Member, Logical]]  # by name
    order: tuple[int, ...]

    @property
    def lengths(self) -> Lengths:
        return dict(zip(self.order, self.weight.shape, strict=True))


@dataclass(frozen=True)
class Unpacked:
    """A checkpoint's tensors with every quantised matrix in place of what stands for it."""

    tensors: tuple[Logical, ...]
    packed: Mapping[str, Packed]  # by the matrix's name
    caches: tuple[Logical, ...] = ()  # scales of the KV cache, which no table knows


def unpack(tensors: Sequence[Logical], formats: Sequence[Format], table: Table) -> Unpacked:
    """Put every matrix in place of the tensors that stand for it.

    Raises:
        DamagedError: a tensor of a format lacks another that belongs to it, or has no shape that the format can have.
    """
    if not formats:
        return Unpacked(tuple(tensors), {})
    by_name = {tensor.name: tensor for tensor in tensors}
    options = {tensor.name: _options(tensor, formats) for tensor in tensors}
    names = {stem + fmt.weight for of_tensor in options.values() for fmt, stem in of_tensor}
    known = known_names(table, names | by_name.keys())
    found: dict[str, Packed] = {}
    taken: dict[str, str] = {}  # member -> matrix
    for tensor in tensors:
        of_tensor = options[tensor.name]
        if not of_tensor or tensor.name in taken:
            continue
        matrices = {stem + fmt.weight for fmt, stem in of_tensor}
        packed = _chosen(tensor, of_tensor, {m: known[m].rule for m in matrices if m in known}, by_name)
        if packed is not None:
            found[packed.weight.name] = packed
            taken |= dict.fromkeys(packed.members, packed.weight.name)
    out: list[Logical] = []
    caches: list[Logical] = []
    placed: set[str] = set()
    for tensor in tensors:
        matrix = taken.get(tensor.name)
        if matrix is None:
            is_cache = is_cache_scale(tensor.name) and tensor.name not in known
            (caches if is_cache else out).append(tensor)
        elif matrix not in placed:
            placed.add(matrix)
            out.append(found[matrix].weight)
    return Unpacked(tuple(out), found, tuple(caches))


def _options(tensor: Logical, formats: Sequence[Format]) -> list[tuple[Format, str]]:
    """The formats of which a tensor may be the first member, each with what comes before the suffix in its name."""
    return [
        (fmt, tensor.name.removesuffix(fmt.members[0].suffix))
        for fmt in formats
        if tensor.name.endswith(fmt.members[0].suffix) and (not fmt.dtypes or tensor.dtype in fmt.dtypes)
    ]


def _chosen(
    tensor: Logical, options: Sequence[tuple[Format, str]], rules: Mapping[str, Rule], by_name: Mapping[str, Logical]
) -> Packed | None:
    """The first format that all tensors fit; else the first that this one fits, for what is wrong with the others."""
    nearest: Packed | None = None
    wanting: DamagedError | None = None
    for promised in (True, False):  # what the table promises decides among formats that shapes alone do not tell apart
        for fmt, stem in options:
            rule = rules.get(stem + fmt.weight)
            order = order_of(rule, fmt.dims)
            members = {
                stem + member.suffix: (member, by_name[stem + member.suffix])
                for member in fmt.members
                if stem + member.suffix in by_name
            }
            lacking = next((m for m in fmt.members if not m.optional and stem + m.suffix not in by_name), None)
            for lengths in _as_promised(tensor, fmt, order, rule) if promised else _as_implied(tensor, fmt, order):
                weight = Logical(stem + fmt.weight, tensor.dtype, tuple(lengths[dim] for dim in order))
                packed = Packed(fmt, weight, members, order)
                if lacking is None:
                    if all(form_of(member, found, packed, rule) is not None for member, found in members.values()):
                        return packed
                    nearest = nearest or packed
                elif wanting is None and not fmt.plain:
                    wanting = DamagedError(
                        f"{tensor.name} is {fmt.name}, and {stem}{lacking.suffix}, which belongs to it, is missing "
                        "from the weights; download or copy the checkpoint again"
                    )
    if nearest is None and wanting is not None:
        raise wanting
    return nearest


def _as_promised(tensor: Logical, fmt: Format, order: tuple[int, ...], rule: Rule | None) -> Iterator[Lengths]:
    """What the table promises of the matrix, where the tensor can be that."""
    promised = _promised(rule, order)
    for form in fmt.members[0].forms:
        if promised is not None and implied(form, promised, tensor.shape, rule, order) == tensor.shape:
            yield promised
            return


def _as_implied(tensor: Logical, fmt: Format, order: tuple[int, ...]) -> Iterator[Lengths]:
    """What the shape of the tensor implies of the matrix."""
    for form in fmt.members[0].forms:
        lengths = inferred(form, tensor.shape)
        if lengths is not None and set(lengths) == set(order):
            yield lengths


def _promised(rule: Rule | None, order: tuple[int, ...]) -> Lengths | None:
    if rule is None or len(rule.dims) != len(order) or None in rule.dims:
        return None
    return {
        number: dim.extent if isinstance(dim, Dim) else dim
        for number, dim in zip(order, rule.dims, strict=True)
        if dim is not None
    }


def order_of(rule: Rule | None, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of a matrix as its table has them: inputs before outputs where what is cut says so.

    A row-parallel matrix is cut along its inputs, any other along its outputs.
    """
    if rule is None or len(rule.dims) != len(dims):
        return dims
    cut = [isinstance(dim, Dim) for dim in rule.dims[-2:]]
    by_input = rule.role in ROW - EMBED
    turned = cut in ([True, False], [False, True]) and cut[0] == by_input
    return (*dims[:-2], IN, OUT) if turned else dims


def form_of(member: Member, tensor: Logical, packed: Packed, rule: Rule | None) -> Form | None:
    """The first form of a member that a tensor has; None where it has none."""
    for form in member.forms:
        if implied(form, packed.lengths, tensor.shape, rule, packed.order) == tensor.shape:
            return form
    return None


def implied(
    form: Form, lengths: Lengths, stored: Sequence[int], rule: Rule | None, order: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The shape that a form implies for a matrix; None where the form has no such number of dimensions."""
    if len(form) != len(stored):
        return None
    out = []
    for entry, length in zip(form, stored, strict=True):
        if isinstance(entry, Of):
            out.append(entry.length(lengths[entry.dim]))
        elif isinstance(entry, Flat):
            out.append(entry.length(lengths[OUT] * lengths[IN]))
        elif isinstance(entry, Parts):
            out.append(_parts(rule, order.index(entry.dim)))
        else:
            out.append(length if entry is None else entry)
    return tuple(out)


def _parts(rule: Rule | None, number: int) -> int:
    """How many parts a dimension of the matrix is fused of."""
    dim = rule.dims[number] if rule is not None and number < len(rule.dims) else None
    return len(dim.segments) if isinstance(dim, Dim) else 1


