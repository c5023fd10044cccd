"""Files that are read as if they held the values of quantised matrices in place of what stands for them.

What is stored lies with a holder: a checkpoint's own files, or the ranks that a quantised one was cut into. Both give
bytes of a tensor and boxes of it, so that values are computed in the same way from either, and never whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .errors import DamagedError, short
from .header import DTYPE_BITS, TensorInfo, WeightsFile
from .intervals import PAD, Run, Runs
from .layout import Cut
from .openfiles import OpenFiles, open_file_budget
from .planning import Placed
from .quantisation.cells import Bounds
from .quantisation.formats import Member
from .quantisation.valuecodes import NUMPY, Array
from .quantisation.valuereader import BoxReader, cuts_of, extents_of
from .quantisation.values import NoValueError, StoredPart, pieces

if TYPE_CHECKING:
    from .quantisation.values import Matrix

_PLAIN = Member("", "values", ((),))


class Holder(Protocol):
    """Who holds the tensors of a quantised checkpoint."""

    def boxes(self, part: StoredPart, bounds: tuple[Bounds, ...]) -> Array:
        """The elements of a stored tensor inside half-open bounds, one pair a dimension."""
        ...

    def read(self, name: str, into: memoryview, at: int) -> None:
        """Fill ``into`` with the bytes of a tensor from its byte ``at``."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class WholeHolder:
    """A checkpoint's files, ``paths`` in the order of the placed layout."""

    def __init__(self, paths: Sequence[Path], placed: Placed) -> None:
        self._files = OpenFiles(paths, [False] * len(paths), open_file_budget() // 2)
        self._extents = extents_of(placed, 0)
        self.boxes = BoxReader(self._files.read, self._extents)

    def read(self, name: str, into: memoryview, at: int) -> None:
        extent = self._extents[name]
        self._files.read(extent.file, into, extent.offset + at)

    def close(self) -> None:
        self._files.close()


class RanksHolder:
    """The files of all ranks, ``paths`` in the order of the placed layout; what several hold is read from the first."""

    def __init__(self, paths: Sequence[Path], placed: Placed) -> None:
        self._files = OpenFiles(paths, [False] * len(paths), open_file_budget() // 2)
        self._ranks = [BoxReader(self._files.read, extents_of(placed, rank)) for rank in range(placed.layout.size)]
        self._cuts = cuts_of(placed)
        self._logical = placed.layout.tensors

    def boxes(self, part: StoredPart, bounds: tuple[Bounds, ...]) -> Array:
        cut = self._cuts[part.name]
        if cut.is_whole:
            return self._ranks[0](part, bounds)
        halved = self._logical[part.name].shape[-1:] != part.shape[-1:]  # elements of four bits, read as bytes
        out = np.empty([high - low for low, high in bounds], NUMPY[part.dtype])
        for rank, runs in _owners(cut, halved=halved):
            shape = tuple(sum(run.length for run in of_dim) for of_dim in runs)
            own = StoredPart(part.name, part.member, part.form, part.dtype, shape)
            for overlap in product(*map(_overlaps, runs, bounds)):
                box = tuple(local for local, _ in overlap)
                out[tuple(slice(*place) for _, place in overlap)] = self._ranks[rank](own, box)
        return out

    def read(self, name: str, into: memoryview, at: int) -> None:
        tensor = self._logical[name]
        each = DTYPE_BITS[tensor.dtype] // 8
        part = StoredPart(name, _PLAIN, (), tensor.dtype, tensor.shape)
        done = 0
        first = at // each
        last = -(-(at + len(into)) // each)
        for bounds in boxes_in_line(tensor.shape, first, last):
            data = np.ascontiguousarray(self.boxes(part, bounds)).reshape(-1).view(np.uint8).data
            skipped = at % each if not done else 0
            count = min(len(data) - skipped, len(into) - done)
            into[done : done + count] = data[skipped : skipped + count]
            done += count

    def close(self) -> None:
        self._files.close()


def _owners(cut: Cut, *, halved: bool = False) -> Iterator[tuple[int, tuple[Runs, ...]]]:
    """Every rank that holds what no rank before it holds, and its runs by dimension."""
    seen: set[tuple[Runs, ...]] = set()
    for rank in range(cut.size):
        runs = tuple(dim.ranks[rank] for dim in cut.dims)
        if cut.shapes[rank] is None or runs in seen:
            continue
        seen.add(runs)
        if halved:
            last = tuple(Run(r.start if r.start == PAD else r.start // 2, r.length // 2) for r in runs[-1])
            runs = (*runs[:-1], last)
        yield rank, runs


def _overlaps(runs: Runs, bounds: Bounds) -> list[tuple[Bounds, Bounds]]:
    """Where runs of a rank lie in bounds of the whole: the place in the rank's own, and in the bounds."""
    found, at = [], 0
    for run in runs:
        low, high = max(run.start, bounds[0]), min(run.start + run.length, bounds[1])
        if run.start != PAD and low < high:
            local = at + low - run.start
            found.append(((local, local + high - low), (low - bounds[0], high - bounds[0])))
        at += run.length
    return found


def boxes_in_line(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[Bounds, ...]]:
    """The elements ``[first, last)`` of a tensor, row after row, as boxes each of which lies in one line."""
    if len(shape) < 2:
        if first < last:
            yield ((first, last),) if shape else ()
        return
    row = prod(shape[1:])
    while first < last:
        number, at = divmod(first, row)
        if at or last - first < row:
            stop = min(last, (number + 1) * row)
            for inner in boxes_in_line(shape[1:], at, stop - number * row):
                yield ((number, number + 1), *inner)
        else:
            stop = last // row * row
            yield ((number, last // row), *((0, length) for length in shape[1:]))
        first = stop


class ValueFiles(OpenFiles):
    """Files of which the first are read as if they held values in place of what stands for them.

    Args:
        files: what the first files hold as they are to be read.
        matrices: the quantised matrices by name.
        dtype: in which their values are read.
        holder: makes who holds what is stored.
    """

    def __init__(
        self,
        files: Sequence[WeightsFile],
        matrices: Mapping[str, Matrix],
        dtype: str,
        holder: Callable[[], Holder],
        paths: Sequence[Path],
        writable: Sequence[bool],
    ) -> None:
        super().__init__(paths, writable, open_file_budget() // 2)
        self._held, self._matrices, self._dtype = files, matrices, dtype
        self._starts = [[info.offset for info in file.tensors] for file in files]
        self._holder = holder()

    def read(self, file: int, into: memoryview, offset: int) -> None:
        """As of any file; bytes of a matrix are computed. Raises DamagedError where it has no values."""
        if file >= len(self._held):
            super().read(file, into, offset)
            return
        done = 0
        while done < len(into):
            number = bisect_right(self._starts[file], offset + done) - 1
            info = self._held[file].tensors[number]
            at = offset + done - info.offset
            size = min(info.nbytes - at, len(into) - done)
            self._read_tensor(info, into[done : done + size], at)
            done += size

    def _read_tensor(self, info: TensorInfo, into: memoryview, at: int) -> None:
        matrix = self._matrices.get(info.name)
        if matrix is None:
            self._holder.read(info.name, into, at)
            return
        size = DTYPE_BITS[self._dtype] // 8
        first, last = at // size, -(-(at + len(into)) // size)
        try:
            for start, values in pieces(matrix, first, last, self._holder.boxes, self._dtype):
                data = values.reshape(-1).view("u1").data
                begin = start * size - at  # of the piece in the buffer; bytes outside it are of halved elements
                low, high = max(begin, 0), min(begin + len(data), len(into))
                into[low:high] = data[low - begin : high - begin]
        except NoValueError as error:
            raise DamagedError(f"{short(info.name)} has no values: {error}; download the checkpoint again") from None

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._holder.close()
