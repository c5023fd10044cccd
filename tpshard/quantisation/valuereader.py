"""Reads boxes of stored tensors by position, and finds out what a holder stores of every quantised matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tpshard.axes import Dim
from tpshard.errors import DamagedError, UnsupportedError, short
from tpshard.intervals import Runs
from tpshard.layout import Cut, cut_dims
from tpshard.partition import partition
from tpshard.planning import Placed
from tpshard.routing import Extent
from tpshard.table import Rule

from .cells import Bounds
from .formats import IN, Flat, Form, Of, Parts
from .linevalues import LineMatrix
from .unpacking import Packed, form_of, implied
from .valuecodes import NUMPY, Array
from .valueformulas import formula_of, why_unknown
from .values import Matrix, StoredPart

_SKIPPED = 4  # so many times what is wanted of a row are read with it, rather than in a read of its own


class BoxReader:
    """``read(part, bounds)`` of one holder's tensors.

    Args:
        read: given the number of a file, a buffer and a position, fills the buffer with the file's bytes.
        extents: where its tensors lie, by name.
    """

    def __init__(self, read: Callable[[int, memoryview, int], None], extents: Mapping[str, Extent]) -> None:
        self.read, self.extents = read, extents

    def __call__(self, part: StoredPart, bounds: tuple[Bounds, ...]) -> Array:
        """The elements of a stored tensor inside half-open bounds, one pair a dimension.

        Raises:
            DamagedError, StorageError: reading failed.
        """
        kind = np.dtype(NUMPY[part.dtype])
        extent = self.extents[part.name]
        shape, inner = part.shape, len(part.shape)
        while inner and bounds[inner - 1] == (0, shape[inner - 1]):
            inner -= 1  # dimensions behind are whole, so that what is wanted of this one lies in one row of bytes
        unit = prod(shape[inner:]) * kind.itemsize
        if not inner:
            return self._rows(extent, 0, unit, kind).reshape(shape)
        low, high = bounds[inner - 1]
        if inner == 1:
            return self._rows(extent, low * unit, (high - low) * unit, kind).reshape(high - low, *shape[1:])
        whole = shape[inner - 1] * unit
        if (high - low) * unit * _SKIPPED >= whole:
            wider = (*bounds[: inner - 1], *((0, length) for length in shape[inner - 1 :]))
            found = self(part, wider)
            return found[(slice(None),) * (inner - 1) + (slice(low, high),)]
        lead = [range(*pair) for pair in bounds[: inner - 1]]
        out = np.empty((*map(len, lead), high - low, *shape[inner:]), kind)
        view = out.reshape(-1).view(np.uint8).data
        size, at = (high - low) * unit, 0
        for index in product(*lead):
            row = 0
            for number, length in zip(index, shape[: inner - 1], strict=True):
                row = row * length + number
            self.read(extent.file, view[at : at + size], extent.offset + row * whole + low * unit)
            at += size
        return out

    def _rows(self, extent: Extent, begin: int, nbytes: int, kind: Any) -> Array:
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            self.read(extent.file, out.data, extent.offset + begin)
        return out.view(kind)


def extents_of(placed: Placed, rank: int) -> dict[str, Extent]:
    """Where one rank's tensors lie, by name."""
    found = {}
    for stored, row in zip(placed.layout.stored, placed.extents, strict=True):
        extent = row[rank]
        if extent is not None:
            found[stored.name] = extent
    return found


def cuts_of(placed: Placed) -> dict[str, Cut]:
    """How every tensor is cut, by name."""
    return {stored.name: stored.pieces[0].cut for stored in placed.layout.stored}


def matrix_of(
    packed: Packed,
    rule: Rule | None,
    dims: Sequence[Dim],
    cuts: Mapping[str, Cut],
    rank: int,
    quantisation: Mapping[str, Any],
) -> Matrix | None:
    """What a rank stores of a quantised matrix; None where it stores nothing of it.

    Args:
        dims: the matrix's dimensions, as the holder's layout cuts them.
        cuts: how the tensors that stand for it are cut, by name.

    Raises:
        UnsupportedError: there is no formula for the format.
        DamagedError: the rank's tensors are not of one part of the matrix.
    """
    formula = formula_of(quantisation, packed.format)
    members = {name: found for name, found in packed.members.items() if found[0].kind != "state"}
    suffixes = {member.suffix for member, _ in packed.members.values()}
    if formula is None or formula.unless & suffixes or (not formula.middle and _lacks_zeros(packed)):
        raise UnsupportedError(
            f"{short(packed.weight.name)} is {packed.format.name}: {why_unknown(quantisation)}; verify by bytes and "
            "plan, and leave --dequantize away"
        )
    in_line = any(isinstance(entry, Flat) for entry in packed.format.members[0].forms[0])
    whole = cut_dims(tuple(dims), cuts[next(iter(members))].size)
    shape = whole.shapes[rank]
    if shape is None:
        return None
    lengths = dict(zip(packed.order, shape, strict=True))
    parts: list[StoredPart] = []
    groups: Runs = ()
    has_order = False
    for name, (member, tensor) in packed.members.items():
        if member.kind == "state" and member.suffix not in formula.globals and not in_line:
            continue
        form = form_of(member, tensor, packed, rule)
        stored = cuts[name].shapes[rank]
        due = () if form is None else _uncut(form, packed)
        if member.kind == "scale" and form is not None and any(
            entry is None and length > 1 for entry, length in zip(form, tensor.shape, strict=True)
        ):
            raise UnsupportedError(
                f"{short(name)} has the shape {list(tensor.shape)}: scales of several inputs in an embedding have no "
                "formula here; verify by bytes and plan, and leave --dequantize away"
            )
        if form is None or stored is None or implied(due, lengths, stored, rule, packed.order) != stored:
            raise DamagedError(
                f"{short(name)} of rank {rank} has the shape {list(stored or ())}, which is not that of its part of "
                f"{short(packed.weight.name)}, {list(shape)}; split again"
            )
        has_order |= member.kind == "order"
        if member.kind == "scale":
            groups = _groups(form, cuts[name], rank)
        parts.append(_bytewise(StoredPart(name, member, form, tensor.dtype, stored)))
    parts.sort(key=lambda part: part.member.kind not in ("values", "packed"))
    whole_groups = any(isinstance(e, Of) and not e.cut for part in parts for e in part.form)
    if whole_groups and not has_order:
        raise UnsupportedError(
            f"{short(packed.weight.name)}: its groups are in an order of inputs, and the tensor that says which "
            "(g_idx) is missing; verify by bytes and plan, and leave --dequantize away"
        )
    fused = {
        number: [partition(Dim((segment,)), whole.size).length(rank) for segment in dim.segments]
        for number, dim in zip(packed.order, dims, strict=True)
        if any(isinstance(e, Parts) and e.dim == number for part in parts for e in part.form)
    }
    kind = LineMatrix if in_line else Matrix
    return kind(packed.weight.name, packed.order, lengths, tuple(parts), formula, fused, groups if has_order else ())


def _uncut(form: Form, packed: Packed) -> Form:
    """The form on a rank: what is whole on every rank has the length of the whole."""
    return tuple(
        entry.length(packed.lengths[entry.dim]) if isinstance(entry, Of) and not entry.cut else entry for entry in form
    )


def _lacks_zeros(packed: Packed) -> bool:
    """Whether a format of unsigned integers with zero points comes without them, so that nobody says what they are."""
    has = any(member.kind == "zero" for member, _ in packed.members.values())
    return packed.format.name.startswith(("AWQ", "affine")) and not has


def _groups(form: Form, cut: Cut, rank: int) -> Runs:
    """Which groups of inputs a rank has scales of; none where all inputs are one group."""
    for number, entry in enumerate(form):
        if isinstance(entry, Of) and entry.dim == IN and entry.stored != entry.per:
            return cut.dims[number].ranks[rank]
    return ()


def _bytewise(part: StoredPart) -> StoredPart:
    """Elements of four bits as the bytes that hold two of them, along the inputs."""
    if part.dtype != "F4":
        return part
    form = tuple(Of(IN, 1, 2) if isinstance(e, Of) and e.dim == IN else e for e in part.form)
    return StoredPart(part.name, part.member, form, "U8", (*part.shape[:-1], part.shape[-1] // 2))
