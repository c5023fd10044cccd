"""Which degrees a model can be cut to, which of them are equal, and what is unequal about the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .axes import Axis, Dim, Padded
from .errors import UnsupportedError, UsageError

LISTED = 24  # degrees named in a message


class Uneven(NamedTuple):
    """An axis that a degree cuts into unequal parts: the fewest and the most units on a rank."""

    axis: Axis
    view: str
    fewest: int
    most: int


class Padding(NamedTuple):
    """An axis that a degree pads: so many units in all."""

    axis: Axis
    units: int


def axes_of(dims: Mapping[str, Sequence[Dim]]) -> dict[Axis, str]:
    """The axes along which tensors are cut, each with the first tensor that lies along it."""
    found: dict[Axis, str] = {}
    seen: set[int] = set()
    for name, tensor_dims in dims.items():
        if id(tensor_dims) in seen:
            continue
        seen.add(id(tensor_dims))
        for dim in tensor_dims:
            for axis in dim.axes:
                found.setdefault(axis, name)
    return found


def largest_degree(axes: Iterable[Axis]) -> int:
    """The most ranks that all the axes can serve; 1 where nothing is cut.

    Axes that more ranks may hold whole do not limit it, unless there are no others.
    """
    axes = list(axes)
    limits = [axis.parts() for axis in axes if not axis.or_whole]
    return min(limits) if limits else max((axis.parts() for axis in axes), default=1)


def equal_degrees(axes: Iterable[Axis], limit: int = 4096) -> list[int]:
    """The degrees up to the largest (and ``limit``) at which every rank holds as much as any other."""
    axes = list(axes)
    return [d for d in range(1, min(largest_degree(axes), limit) + 1) if all(axis.is_equal(d) for axis in axes)]


def uneven(axes: Iterable[Axis], tp_size: int) -> list[Uneven]:
    """What is unequal at this degree, padding counted as held."""
    out = []
    for axis in axes:
        padding = axis.padding(tp_size)
        for view in axis.views():
            sizes = [stop - start + pad for (start, stop), pad in zip(axis.bounds(view, tp_size), padding, strict=True)]
            if min(sizes) != max(sizes):
                out.append(Uneven(axis, view, min(sizes), max(sizes)))
    return out


def held_whole(axes: Iterable[Axis], tp_size: int) -> list[Axis]:
    """The axes that every rank of this degree holds whole, having fewer parts than there are ranks."""
    return [axis for axis in axes if axis.is_whole(tp_size)]


def paddings(axes: Iterable[Axis], tp_size: int) -> list[Padding]:
    """What is padded at this degree."""
    found = [Padding(axis, sum(axis.padding(tp_size))) for axis in axes if isinstance(axis, Padded)]
    return [padding for padding in found if padding.units]


def check_degree(tp_size: int, axes: Mapping[Axis, str], *, even: bool = False) -> None:
    """Raise unless the model can be cut to ``tp_size`` ranks (into equal parts, with ``even``).

    Raises:
        UsageError: the degree is below 1.
        UnsupportedError: an axis has fewer parts than ranks, or is unequal under ``even``; names a tensor,
            the numbers and the degrees that work.
    """
    if tp_size < 1:
        raise UsageError(f"a degree of {tp_size} makes no sense; the tensor-parallel degree is a whole number from 1")
    largest = largest_degree(axes)
    for axis, tensor in axes.items():
        if not axis.serves(tp_size):
            raise UnsupportedError(
                f"{tensor} cannot be shared by {tp_size} ranks: its axis '{axis.name}' has {axis.describe()}, "
                f"enough for at most {axis.parts()} ranks; this model takes degrees 1 to {largest}, "
                f"in equal parts {listed(equal_degrees(axes))}"
            )
    if tp_size > largest:  # where no tensor is cut at all, or none would be
        raise UnsupportedError(f"no tensor of the model can be cut, so {tp_size} ranks cannot share it; take degree 1")
    if even:
        for axis, tensor in axes.items():
            if not axis.is_equal(tp_size):
                raise UnsupportedError(
                    f"{tensor} cannot be cut into {tp_size} equal parts: its axis '{axis.name}' has "
                    f"{axis.describe()}; equal degrees are {listed(equal_degrees(axes))} "
                    f"(without --even any degree from 1 to {largest} works)"
                )


def listed(degrees: Sequence[int]) -> str:
    """``1, 2, 6`` - shortened where there are very many."""
    if len(degrees) <= LISTED:
        return ", ".join(map(str, degrees))
    return ", ".join(map(str, degrees[: LISTED - 1])) + f", ... {degrees[-1]}"


def describe_uneven(found: Uneven) -> str:
    """One line for people: ``heads: 1 to 2 query heads a rank (6 query heads over 2 kv heads)``."""
    noun = found.axis.noun_of(found.view)
    return f"{found.axis.name}: {found.fewest} to {found.most} {noun} a rank ({found.axis.describe()})"


def describe_padding(found: Padding) -> str:
    """One line for people: ``3 padded vocabulary rows``."""
    noun = found.axis.noun_of("unit")
    return f"{found.units} padded {noun[:-1] if found.units == 1 and noun.endswith('s') else noun}"


def describe_held_whole(axis: Axis, tp_size: int) -> str:
    """One line for people: ``vision_heads: whole on every rank, its 4 heads are too few for 8 ranks``."""
    return f"{axis.name}: whole on every rank, its {axis.describe()} are too few for {tp_size} ranks"
