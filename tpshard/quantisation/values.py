"""The numbers that stored integers and small floats stand for: one formula, from whichever holder's tensors.

Every method here is ``(code - zero point) * scale`` or ``code * scale + offset``, with a scale for all of the matrix
besides in some, computed in float32: differences of integers and products with scales of 16 bits are exact there, and
what comes out is rounded once. Codes are few, so that where a group has more values than there are codes, each group's
are computed once a code, rounded, and looked up. A :class:`Matrix` is read by windows, so that nothing of its size is
ever held. A rank's part is read as an engine reads it: from the rank's own tensors, as if they were all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tpshard.errors import short
from tpshard.intervals import Runs, total

from .cells import Bounds, Cells, cell_of_each, shared_cells
from .formats import BANK, IN, OUT, Entry, Form, Member, Of, Parts
from .valuecodes import E2M1, FLOATS, NUMPY, Array, code_numbers, floats, integers, looked_up, rounded

Window: TypeAlias = "Mapping[int, Bounds]"
"""Half-open bounds of indices by dimension of the matrix: ``OUT``, ``IN``, ``BANK``."""

Read: TypeAlias = "Callable[[StoredPart, tuple[Bounds, ...]], Array]"
"""``read(part, bounds)``: so much of a stored tensor, as numpy elements (``NUMPY`` of its dtype)."""

CHUNK = 1 << 18  # elements computed at a time: enough that numpy, not Python, takes the time; some 4 MB at work

UNSIGNED, OFFSET, SIGNED, FLOAT4 = "unsigned", "offset", "signed", "float4"


class NoValueError(ValueError):
    """Stored tensors have no value: an index of groups (``g_idx``) names one that its holder has not."""


@dataclass(frozen=True)
class Formula:
    """How a format's numbers are made of what is stored.

    Args:
        codes: of packed values: ``unsigned`` integers, integers less half of their range (``offset``), in two's
            complement (``signed``), or E2M1.
        order: which number of a word's run the word's first, second, ... integer is; empty: as they come.
        zero: what is added to stored zero points (GPTQ of version 1 stores them less one).
        middle: whether the zero point is half of the range where none is stored.
        added: whether what is stored as zero points is added to the product instead.
        factor: what every product is multiplied by in the end.
        unless: suffixes of members with which the formula would be another, unknown one.
        globals: scales of the whole matrix by suffix: 1 where they multiply those of groups, -1 where they divide them.
        source: where the formula is from.
    """

    codes: str = UNSIGNED
    order: tuple[int, ...] = ()
    zero: int = 0
    middle: bool = False
    added: bool = False
    factor: float = 1.0
    unless: frozenset[str] = frozenset()
    globals: Mapping[str, int] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class StoredPart:
    """What a holder stores of one member, and in which of the member's forms."""

    name: str
    member: Member
    form: Form
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix, or a rank's part of one.

    Args:
        name: the matrix's.
        order: its dimensions as its table has them.
        lengths: how long each of them is on this holder.
        parts: the members that take part in the formula; the values come first.
        fused: the lengths of the parts that a dimension is fused of, where scales are by part.
        groups: the groups of inputs that this holder has scales of, for an order of inputs: numbers in it are the
            whole matrix's.
    """

    name: str
    order: tuple[int, ...]
    lengths: Mapping[int, int]
    parts: tuple[StoredPart, ...]
    formula: Formula
    fused: Mapping[int, Sequence[int]] = field(default_factory=dict)
    groups: Runs = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """As the table has it."""
        return tuple(self.lengths[dim] for dim in self.order)

    def rows(self, first: int, last: int, read: Read, dtype: str = "F32") -> Array:
        """Indices ``[first, last)`` of the first dimension in the dtype, C-contiguous."""
        return self.values({self.order[0]: (first, last)}, read, dtype)

    def values(self, window: Window, read: Read, dtype: str = "F32") -> Array:
        """The values inside a window (a dimension that it does not name is whole), in the table's order.

        They are computed in float32 and rounded to the dtype (codes of it, for BF16).

        Raises:
            NoValueError: an order of inputs names a group that this holder has not.
        """
        with np.errstate(all="ignore"):  # what is too large is infinite, as in every reference
            box = {dim: window.get(dim, (0, self.lengths[dim])) for dim in self.order}
            found = self._values(box, read, dtype)
            return np.ascontiguousarray(np.transpose(found, [_dims(box).index(dim) for dim in self.order]))

    def _values(self, box: Window, read: Read, dtype: str) -> Array:
        """Values ``[bank?, out, in]``."""
        codes, numbers = self._codes(self.parts[0], box, read)
        order = next((part for part in self.parts if part.member.kind == "order"), None)
        groups = None if order is None else self._groups(order, box[IN], read)
        stored = [part for part in self.parts[1:] if part.member.kind == "scale"]
        scales = [self._scale(part, box, read, groups, together=part is stored[0]) for part in stored]
        zero = next((part for part in self.parts if part.member.kind == "zero"), None)
        zeros = None if zero is None else self._zeros(zero, box, read, groups)
        cells = [*scales, *([zeros] if zeros is not None else [])]
        shared = None if numbers is None else shared_cells(cells)
        if numbers is not None and shared is not None and shared.values.size * len(numbers) * 2 <= codes.size:
            lined = [cell.values[..., None] for cell in cells]
            table = rounded(self._product(numbers, lined[: len(scales)], lined[len(scales) :]), dtype)
            return looked_up(table, codes, shared.maps)
        spread = [cell.spread() for cell in cells]
        each = codes if numbers is None else looked_up(numbers, codes)
        return rounded(self._product(each, spread[: len(scales)], spread[len(scales) :]), dtype)

    def _product(self, codes: Array, scales: Sequence[Array], zeros: Sequence[Array]) -> Array:
        """The formula, float32."""
        for zero in () if self.formula.added else zeros:
            codes = codes - zero
        if not zeros and self.formula.middle:
            codes = codes - np.float32(2 ** (self.bits - 1))
        for scale in scales:
            codes = codes * scale
        for zero in zeros if self.formula.added else ():
            codes = codes + zero
        return codes if self.formula.factor == 1 else codes * np.float32(self.formula.factor)

    @property
    def bits(self) -> int:
        """Bits of a packed number."""
        first = self.parts[0]
        packed = next((e for e in first.form if isinstance(e, Of) and e.stored != e.per), None)
        if packed is None:
            return 8
        word = np.dtype(NUMPY[first.dtype]).itemsize * 8
        return word * packed.stored * _ends(first.form) // packed.per

    def _codes(self, part: StoredPart, box: Window, read: Read) -> tuple[Array, Array | None]:
        """Codes ``[bank?, out, in]`` and the number of each, float32; numbers without codes, where those are many."""
        form = part.form
        stored = read(part, self.bounds(part, box))
        dims = [e.dim for e in form if isinstance(e, Of)]
        axis = next((n for n, e in enumerate(form) if isinstance(e, Of) and e.stored != e.per), None)
        if axis is None:
            numbers = code_numbers(part.dtype)
            found = floats(stored, part.dtype) if numbers is None else stored.view(np.uint8)
            return np.transpose(found, [dims.index(dim) for dim in _dims(box)]), numbers
        entry = form[axis]
        assert isinstance(entry, Of)
        if isinstance(form[-1], int):  # the bytes of a group in a dimension of their own
            stored = stored.reshape(*stored.shape[:-2], -1)
        found = self._unpacked(stored, axis, entry, box[entry.dim])
        return np.transpose(found, [dims.index(dim) for dim in _dims(box)]), self._numbers()

    def _numbers(self) -> Array:
        """What every code of a packed number stands for, float32."""
        if self.formula.codes == FLOAT4:
            return E2M1
        half = 2 ** (self.bits - 1)
        codes = np.arange(2 * half, dtype=np.float32)
        if self.formula.codes == OFFSET:
            return np.asarray(codes - half)
        return np.asarray(np.where(codes >= half, codes - 2 * half, codes)) if self.formula.codes == SIGNED else codes

    def _unpacked(self, words: Array, axis: int, entry: Of, bounds: Bounds) -> Array:
        """The codes of a window in words that begin where the groups of the window do, uint8."""
        each = _ends(self.parts[0].form)
        gapless = words.dtype.itemsize * 8 * entry.stored * each == self.bits * entry.per
        codes = integers(words, self.bits, axis, gapless=gapless, order=self.formula.order)
        first = bounds[0] // entry.per * entry.per
        return codes[(slice(None),) * axis + (slice(bounds[0] - first, bounds[1] - first),)]

    def _zeros(self, part: StoredPart, box: Window, read: Read, groups: Array | None) -> Cells:
        """Zero points. They are packed along the dimension in which scales have another entry."""
        scale = next(other for other in self.parts if other.member.kind == "scale")
        stored, form = read(part, self.bounds(part, box, groups)), part.form
        pairs = list(zip(part.form, scale.form, strict=False))
        axis = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if axis is None or not part.dtype.endswith(("16", "32", "64")) or part.dtype in FLOATS:
            found = floats(stored, part.dtype)
        else:
            ours, theirs = pairs[axis]
            assert isinstance(ours, Of) and isinstance(theirs, Of)
            gapless = stored.dtype.itemsize * 8 * ours.stored * theirs.per == self.bits * ours.per * theirs.stored
            codes = integers(stored, self.bits, axis, gapless=gapless, order=self.formula.order)
            first = box[ours.dim][0] // ours.per * ours.per // theirs.per * theirs.stored
            low, high = self._stretch(theirs, scale.shape[axis], box, groups)
            found = codes[(slice(None),) * axis + (slice(low - first, high - first),)].astype(np.float32)
            if self.formula.codes == OFFSET:
                found -= np.float32(2 ** (self.bits - 1))
            form = scale.form
        if self.formula.zero:
            found += np.float32(self.formula.zero)
        return self._cells(found, form, box, groups)

    def _scale(self, part: StoredPart, box: Window, read: Read, groups: Array | None, *, together: bool) -> Cells:
        """Scales of groups, together with those of the whole matrix if so."""
        found = floats(read(part, self.bounds(part, box, groups)), part.dtype, exponents=True)
        out = None
        for whole in self.parts if together else ():
            power = self.formula.globals.get(whole.member.suffix)
            if power is None:
                continue
            each = floats(read(whole, self.bounds(whole, box)), whole.dtype)
            if each.size > 1:  # one for every fused part
                out = self._cells(found, part.form, box, groups).spread() if out is None else out
                out = _together(out, self._cells(each, whole.form, box).spread(), power)
            else:
                found = _together(found, each.reshape(-1)[0], power)
        return self._cells(found, part.form, box, groups) if out is None else Cells(out, (None,) * out.ndim)

    def _groups(self, part: StoredPart, bounds: Bounds, read: Read) -> Array | None:
        """For every input of the window the place of its group among those of this holder; None with one group."""
        held = total(self.groups)
        if not held:
            return None
        named = read(part, (bounds,)).astype(np.int64)
        places = np.full(max((run.start + run.length for run in self.groups), default=0), -1)
        at = 0
        for run in self.groups:
            places[run.start : run.start + run.length] = np.arange(at, at + run.length)
            at += run.length
        there = (named >= 0) & (named < len(places))
        found = np.where(there, places[np.where(there, named, 0)], -1)
        if (found < 0).any():
            wrong = int(named[found < 0][0])
            raise NoValueError(
                f"{short(part.name)} names group {wrong}, and there are scales of groups "
                f"{', '.join(f'{run.start}-{run.start + run.length - 1}' for run in self.groups)} beside it"
            )
        return found

    def bounds(self, part: StoredPart, box: Window, groups: Array | None = None) -> tuple[Bounds, ...]:
        """What of a stored tensor is needed for a window."""
        return tuple(
            self._stretch(entry, length, box, groups) for entry, length in zip(part.form, part.shape, strict=True)
        )

    @staticmethod
    def _stretch(entry: Entry, length: int, box: Window, groups: Array | None) -> Bounds:
        if not isinstance(entry, Of) or (groups is not None and entry.dim == IN):
            return 0, length  # which groups are needed, only the order of inputs says
        low, high = box[entry.dim]
        return low // entry.per * entry.stored, min(-(-high // entry.per) * entry.stored, length)

    def _cells(self, stored: Array, form: Form, box: Window, groups: Array | None = None) -> Cells:
        """What was read for a window as ``[bank?, out, in]``: of length 1 where it is one for all."""
        dims: list[int] = []
        maps: dict[int, Array | None] = {}
        for entry in form:
            axis = len(dims)
            if isinstance(entry, Of):
                order = groups if entry.dim == IN else None
                maps[entry.dim] = cell_of_each(stored.shape[axis], entry, box[entry.dim], order)
                dims.append(entry.dim)
            elif isinstance(entry, Parts) and stored.shape[axis] > 1:
                low, high = box[entry.dim]
                maps[entry.dim] = np.repeat(np.arange(stored.shape[axis]), self.fused[entry.dim])[low:high]
                dims.append(entry.dim)
            else:
                stored = stored.squeeze(axis)
        wanted = _dims(box)
        stored = np.transpose(stored, [dims.index(dim) for dim in wanted if dim in dims])
        stored = np.expand_dims(stored, tuple(n for n, dim in enumerate(wanted) if dim not in dims))
        return Cells(stored, tuple(maps.get(dim) for dim in wanted))


def pieces(matrix: Matrix, first: int, last: int, read: Read, dtype: str = "F32") -> Iterator[tuple[int, Array]]:
    """The values of the elements ``[first, last)``, row after row, as ``(number of the first, values in the dtype)``.

    What they need of the members is read once; they are computed a cache's worth at a time.
    """
    *lead, rows, width = matrix.shape
    outer = rows * width
    while first < last:
        index, at = divmod(first, outer)
        low, high = at // width, -(-min(at + last - first, outer) // width)
        fixed: dict[int, Bounds] = {}
        for dim, length in zip(reversed(matrix.order[:-2]), reversed(lead), strict=True):
            index, place = divmod(index, length)
            fixed[dim] = place, place + 1
        along, across = matrix.order[-2:]
        held = _Held(matrix, {**fixed, along: (low, high)}, read)
        step = max(1, CHUNK // width)
        while low < high and first < last:
            column, left = at - low * width, min(last - first, outer - at)
            if column or left < width or width > CHUNK:
                count = min(width - column, left, CHUNK)
                window = {along: (low, low + 1), across: (column, column + count)}
            else:
                count = min(step, left // width) * width
                window = {along: (low, low + count // width)}
            yield first, matrix.values({**fixed, **window}, held, dtype)
            first, at = first + count, at + count
            low = at // width


class _Held:
    """Reads of a matrix' members from what is read of them once for a wider window."""

    def __init__(self, matrix: Matrix, window: Window, read: Read) -> None:
        self._matrix, self._read = matrix, read
        self._box = {dim: window.get(dim, (0, matrix.lengths[dim])) for dim in matrix.order}
        self._known: dict[str, tuple[tuple[Bounds, ...], Array]] = {}

    def __call__(self, part: StoredPart, bounds: tuple[Bounds, ...]) -> Array:
        held = self._known.get(part.name)
        if held is None:
            due = self._matrix.bounds(part, self._box)
            if not _inside(bounds, due):
                due = bounds  # in an order of inputs any group may be asked for
            held = self._known[part.name] = due, self._read(part, due)
        have, found = held
        if bounds == have:
            return found
        if not _inside(bounds, have):
            return self._read(part, bounds)
        return found[tuple([slice(a - start, b - start) for (a, b), (start, _) in zip(bounds, have, strict=True)])]


def _inside(inner: Sequence[Bounds], outer: Sequence[Bounds]) -> bool:
    return all(a <= c and d <= b for (c, d), (a, b) in zip(inner, outer, strict=True))


def _together(scale: Array, whole: Array, power: int) -> Array:
    return scale * whole if power > 0 else scale / whole


def _dims(box: Window) -> list[int]:
    return [dim for dim in (BANK, OUT, IN) if dim in box]


def _ends(form: Form) -> int:
    """The words of one stored index that lie in a dimension of their own; 1 where none do."""
    return form[-1] if isinstance(form[-1], int) else 1
