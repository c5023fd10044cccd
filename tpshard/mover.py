"""Carries out tiles: positional reads, copies inside one reused buffer, checks, positional writes.

A :class:`Mover` belongs to one thread. Its buffer is allocated once; nothing else grows with the
size of a tensor. numpy moves matrices of many rows where :attr:`Mover.numpy` holds it, and is never
imported here: that costs more than moving a small checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .digest import Stream
from .errors import DamagedError
from .findings import Difference, Findings
from .matrices import Clear, Move, Moves
from .openfiles import OpenFiles
from .routing import Extent
from .tiles import Blank, Equal, Piece, Tile

if TYPE_CHECKING:
    import numpy as np

    Matrix = np.ndarray[Any, Any]

_ZEROS = bytes(64 << 10)
MOST_VIEWS = 1 << 14  # of rows, in one tile: some 3 MiB of them


class Ends(NamedTuple):
    """The two ends of a plan, as every thread sees them."""

    reads: Sequence[Extent]
    writes: Sequence[Extent]
    files: OpenFiles  # the source files, then the target files
    first_target: int  # how many source files there are
    findings: Findings | None  # None: a difference raises
    compare: bool  # targets are compared, not written


class Mover:
    """One thread's buffer and the work done in it. ``room`` is the buffer's size in bytes."""

    def __init__(self, ends: Ends, room: int) -> None:
        self.ends = ends
        self._buffer = bytearray(room)
        self.view = memoryview(self._buffer)
        #: what the targets hold after :meth:`store`, at the same places as in :attr:`view`
        self.held = memoryview(bytearray(room)) if ends.compare else self.view
        self._views: dict[int, tuple[Moves, list[tuple[Matrix, Matrix]]]] = {}
        self.numpy: Any = None  # the module, once it is loaded
        self._weaves: dict[int, tuple[Moves, list[list[memoryview]]]] = {}
        self._views_held = 0
        self.bytes_read = 0
        self.bytes_written = 0

    # -- a tile ------------------------------------------------------------------------------

    def load(self, loads: Sequence[Piece]) -> None:
        """Read all pieces, those that adjoin in a file with one call."""
        self._transfer(loads, self.ends.reads, 0, self.ends.files.read, self.view)
        self.bytes_read += sum([piece[2] for piece in loads])

    def store(self, stores: Sequence[Piece]) -> None:
        """Write all pieces, or compare them with what the targets hold."""
        if self.ends.compare:
            self._transfer(stores, self.ends.writes, self.ends.first_target, self.ends.files.read, self.held)
            for piece in stores:
                self._compare(piece)
        else:
            self._transfer(stores, self.ends.writes, self.ends.first_target, self.ends.files.write, self.view)
        self.bytes_written += sum([piece[2] for piece in stores])

    def _transfer(
        self,
        pieces: Sequence[Piece],
        extents: Sequence[Extent],
        first_file: int,
        call: Callable[[int, memoryview, int], None],
        view: memoryview,
    ) -> None:
        file, offset, begin, end = -1, 0, 0, 0
        for extent, at, nbytes, pos in pieces:
            if not nbytes:
                continue
            _, next_file, start, _ = extents[extent]
            if next_file == file and pos == end and start + at == offset + end - begin:
                end += nbytes
                continue
            if file >= 0:
                call(file + first_file, view[begin:end], offset)
            file, offset, begin, end = next_file, start + at, pos, pos + nbytes
        if file >= 0:
            call(file + first_file, view[begin:end], offset)

    def check(self, tile: Tile) -> None:
        """Check what must be equal or zero."""
        for equal in tile.equals:
            self._check_equal(equal)
        for blank in tile.blanks:
            self._check_blank(blank)

    def rearrange(self, inside: Moves) -> None:
        """Make the stores' bytes in the buffer."""
        for clear in inside.clears:
            self._clear(clear)
        view = self.view
        for source, target, length in inside.runs:
            view[target : target + length] = view[source : source + length]
        if self.numpy is None:
            for move in inside.moves:
                self._move_by_rows(move)
        elif inside.rows:
            for target_matrix, source_matrix in self._known_matrices(inside):
                self.numpy.copyto(target_matrix, source_matrix)
        else:
            for move in inside.moves:
                self.numpy.copyto(*self._matrices(move))

    def woven(self, inside: Moves) -> list[list[memoryview]] | None:
        """Return for every store the views whose bytes, joined, are what it writes; None where that is no help.

        Without numpy this is the fast way to gather rows: some 50 ns each, a fifth of a slice assignment.
        """
        known = self._weaves.get(id(inside))
        if known is not None:
            return known[1]
        count = inside.rows * sum(map(len, inside.strands))
        if self.numpy is not None or self.ends.compare or not inside.rows or count > MOST_VIEWS:
            return None
        if self._views_held + count > 2 * MOST_VIEWS:
            self._weaves.clear()
            self._views_held = 0
        view = self.view
        weave = []
        for strands in inside.strands:
            columns = []
            for pos, length, step in strands:
                if pos < 0:
                    columns.append([memoryview(bytes(length))] * inside.rows)
                else:
                    columns.append([view[at : at + length] for at in range(pos, pos + inside.rows * step, step)])
            weave.append([piece for row in zip(*columns, strict=True) for piece in row])
        self._weaves[id(inside)] = (inside, weave)  # holding `inside` keeps its id
        self._views_held += count
        return weave

    def store_bytes(self, piece: Piece, data: bytes) -> None:
        """Write one piece that doesn't lie in the buffer."""
        extent = self.ends.writes[piece.extent]
        self.ends.files.write(extent.file + self.ends.first_target, memoryview(data), extent.offset + piece.at)
        self.bytes_written += len(data)

    # -- inside the buffer -------------------------------------------------------------------

    def _known_matrices(self, inside: Moves) -> list[tuple[Matrix, Matrix]]:
        known = self._views.get(id(inside))
        if known is None:
            if len(self._views) >= 256:
                self._views.clear()
            # holding `inside` keeps its id from being used again
            known = self._views[id(inside)] = (inside, [self._matrices(move) for move in inside.moves])
        return known[1]

    def _matrices(self, move: Move) -> tuple[Matrix, Matrix]:
        numpy = self.numpy
        source, target, length, rows, source_step, target_step, count, source_skip, target_skip = move
        inner: tuple[int, ...]
        if length <= 16:  # one element a row: an inner loop over so few bytes would cost more than the bytes
            shape: tuple[int, ...] = (count, rows)
            kind, inner = numpy.dtype(f"V{length}"), ()
        else:
            shape, kind, inner = (count, rows, length), numpy.dtype(numpy.uint8), (1,)
        make = numpy.ndarray
        return (
            make(shape, kind, self._buffer, target, (target_skip, target_step, *inner)),
            make(shape, kind, self._buffer, source, (source_skip, source_step, *inner)),
        )

    def _move_by_rows(self, move: Move) -> None:
        source, target, length, rows, source_step, target_step, count, source_skip, target_skip = move
        view = self.view
        for matrix in range(count):
            a, b = source + matrix * source_skip, target + matrix * target_skip
            for _ in range(rows):
                view[b : b + length] = view[a : a + length]
                a += source_step
                b += target_step

    def _clear(self, clear: Clear) -> None:
        pos, length, rows, step = clear
        if step == length:
            rows, length = 1, rows * length
        for _ in range(rows):
            for begin in range(pos, pos + length, len(_ZEROS)):
                end = min(begin + len(_ZEROS), pos + length)
                self.view[begin:end] = _ZEROS[: end - begin]
            pos += step

    # -- comparing ---------------------------------------------------------------------------

    def _check_equal(self, equal: Equal) -> None:
        pos, other_pos, length, rows, step, other_step, extent, _, other, other_at = equal
        if step == length == other_step:
            rows, length = 1, rows * length
        for row in range(rows):
            begin, other_begin = pos + row * step, other_pos + row * other_step
            if not self._buffer.startswith(self.view[other_begin : other_begin + length], begin):
                ahead = _first_difference(self._buffer, begin, self.view[other_begin : other_begin + length])
                self._report_replica(extent, other, other_at + row * other_step + ahead)
                return

    def _report_replica(self, extent: int, other: int, offset: int) -> None:
        reads, files = self.ends.reads, self.ends.files
        one, two = reads[extent], reads[other]
        here, there = files.paths[one.file], files.paths[two.file]
        if self.ends.findings is None:
            raise DamagedError(
                f"{two.tensor}: {here.name} and {there.name} hold different bytes where both must hold the same "
                f"(byte {offset} of {two.nbytes} in {there.name}). Neither is preferred: find out which of {here} and "
                f"{there} is right (`tpshard verify` lists every difference) and write or fetch the other again."
            )
        self.ends.findings.add(other, Difference(two.tensor, "replica", there.name, here.name, offset))

    def _check_blank(self, blank: Blank) -> None:
        pos, length, rows, step, extent, at = blank
        if step == length:
            rows, length = 1, rows * length
        for row in range(rows):
            begin, end = pos + row * step, pos + row * step + length
            while begin < end:
                size = min(end - begin, len(_ZEROS))
                if not self._buffer.startswith(_ZEROS[:size] if size < len(_ZEROS) else _ZEROS, begin):
                    ahead = _first_difference(self._buffer, begin, memoryview(_ZEROS)[:size])
                    self._report_padding(extent, at + begin + ahead - pos)
                    return
                begin += size

    def _report_padding(self, extent: int, offset: int) -> None:
        found = self.ends.reads[extent]
        path = self.ends.files.paths[found.file]
        if self.ends.findings is None:
            raise DamagedError(
                f"{found.tensor}: byte {offset} of {found.nbytes} in {path.name} belongs to padding, which must be "
                f"zero and isn't. Taking it off would lose data: write {path} again, or check that its layout is right."
            )
        self.ends.findings.add(extent, Difference(found.tensor, "padding", path.name, "", offset))

    def _compare(self, piece: Piece) -> None:
        """Compare what would be written with what the target holds."""
        index, at, nbytes, pos = piece
        held = self.held[pos : pos + nbytes]
        if not self._buffer.startswith(held, pos):
            extent, ends = self.ends.writes[index], self.ends
            offset = at + _first_difference(self._buffer, pos, held)
            path = ends.files.paths[extent.file + ends.first_target]
            assert ends.findings is not None  # compare mode always collects
            ends.findings.add(index, Difference(extent.tensor, "content", path.name, "", offset))

    # -- digests of what didn't pass in order ------------------------------------------------

    def stream(self, file: int, offset: int, stream: Stream, stop: threading.Event) -> str | None:
        """Feed ``stream`` its extent, which begins at ``offset`` of ``file``; return the digest.

        None when ``stop`` was set meanwhile.
        """
        room = len(self.view)
        for begin in range(0, stream.nbytes, room):
            if stop.is_set():
                return None
            size = min(stream.nbytes - begin, room)
            self.ends.files.read(file, self.view[:size], offset + begin)
            stream.feed(begin, self.view[:size])
        return stream.hexdigest()


def _first_difference(buffer: bytearray, begin: int, other: memoryview) -> int:
    """Return how many bytes from ``begin`` on equal ``other``; they are known not to be equal throughout."""
    low, high = 0, len(other)  # the first difference lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if buffer.startswith(other[low:middle], begin + low):
            low = middle
        else:
            high = middle
    return low
