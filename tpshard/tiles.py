"""From strips to tiles: what is loaded, moved, compared and stored with one buffer full of bytes.

A tile is what one thread does between two looks at the work queue's stop flag. Its buffer has two
parts: ``[0, load_room)`` takes what is read, and ``[load_room, load_room + stage_room)`` takes what
must be gathered before it is written. A piece that lies contiguous on both ends is stored straight
from where it was read. This module is geometry only: it opens nothing and touches no bytes.

Positions called ``pos`` are offsets into the buffer; ``at`` is an offset from the start of a stored
tensor. All are bytes, all ranges half-open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .matrices import Clear, Move, Moves, Run, Strand, row_moves
from .routing import Extent, Route, Strip, Task
from .segments import Segment, in_stream_order, segments_of

LARGE = 64 << 10  # from here on a write of its own costs less than gathering its bytes first


class Piece(NamedTuple):
    """Bytes ``[at, at + nbytes)`` of an extent, at ``pos`` in the buffer."""

    extent: int
    at: int
    nbytes: int
    pos: int


class Equal(NamedTuple):
    """Two byte matrices that must be equal, and where they come from."""

    pos: int
    other_pos: int
    length: int
    rows: int
    step: int
    other_step: int
    extent: int
    at: int
    other: int
    other_at: int


class Blank(NamedTuple):
    """A byte matrix that must be zero, and where it comes from."""

    pos: int
    length: int
    rows: int
    step: int
    extent: int
    at: int


class Tile(NamedTuple):
    """One buffer full: loads, then checks, then moves, then stores."""

    loads: Sequence[Piece]
    equals: Sequence[Equal]
    blanks: Sequence[Blank]
    inside: Moves
    stores: Sequence[Piece]


_NOTHING = Moves((), (), ())


class Tiler:
    """Makes tiles; remembers what it worked out for a route or a strip geometry. One per thread.

    ``load_room`` and ``stage_room`` are the sizes of the two parts of the buffer.
    """

    def __init__(self, load_room: int, stage_room: int) -> None:
        self.load_room = load_room
        self.stage_room = stage_room
        self._segments: dict[int, tuple[Route, tuple[Segment, ...], tuple[int, ...]]] = {}
        self._moves: dict[tuple[object, ...], tuple[Route, Moves]] = {}

    # -- what a route means ------------------------------------------------------------------

    def _known(self, route: Route) -> tuple[Route, tuple[Segment, ...], tuple[int, ...]]:
        known = self._segments.get(id(route))
        if known is None:
            segments = in_stream_order(segments_of(route))
            used: dict[int, int] = {}
            for segment in segments:
                for source, _ in ((segment.source, 0), *segment.others):
                    used[source] = used.get(source, 0) + segment.length
            widths = tuple(used.get(source, 0) for source in range(max(used, default=-1) + 1))
            known = (route, segments, widths)  # holding the route keeps its id from being used again
            self._segments[id(route)] = known
        return known

    def wholly_read(self, task: Task, reads: Sequence[Extent]) -> list[int]:
        """Return the extents of ``task.reads`` whose every byte some strip reads.

        It doesn't depend on how the task is cut into tiles, so neither do the digests.
        """
        covered = [0] * len(task.reads)
        for strip in task.strips:
            used = self._known(strip.route)[2]
            for span, width in zip(strip.sources, used, strict=False):
                if width >= span.width:
                    covered[span.extent] += strip.rows * width
        return [extent for extent, nbytes in zip(task.reads, covered, strict=True) if nbytes >= reads[extent].nbytes]

    # -- runs --------------------------------------------------------------------------------

    def tiles(self, task: Task, strip: Strip) -> Iterator[Tile]:
        """Yield the tiles of one strip of a task, in an order that keeps extents ascending where that is possible."""
        if strip.rows == 0:
            return
        if strip.rows == 1:
            yield from self._run_tiles(task, strip, 0, 1)
        elif _is_flat(strip):
            yield from self._run_tiles(task, strip, 0, strip.rows)
        else:
            load_width = sum(span.width for span in strip.sources)
            stage_width = sum(span.width for span in strip.targets)
            height = strip.rows
            if load_width:
                height = min(height, self.load_room // load_width)
            if stage_width:
                height = min(height, self.stage_room // stage_width)
            if height and _fills_targets(strip):
                yield from self._row_tiles(task, strip, height)
            else:
                for row in range(strip.rows):
                    yield from self._run_tiles(task, strip, row, 1)

    def _run_tiles(self, task: Task, strip: Strip, row: int, tall: int) -> Iterator[Tile]:
        """Tiles of row ``row`` taken as byte runs, or of ``tall`` rows that are contiguous on every end."""
        window: list[tuple[Segment, int, int]] = []
        loaded = staged = 0
        for segment in self._known(strip.route)[1]:
            done, length = 0, segment.length * tall
            ends, copies = 1 + len(segment.others), len(segment.targets)
            while done < length:
                size = min(length - done, (self.load_room - loaded) // ends)
                if size < LARGE and copies:
                    size = min(size, (self.stage_room - staged) // copies)
                if window and size < min(length - done, LARGE):
                    yield self._run_tile(task, strip, row, tall, window)
                    window, loaded, staged = [], 0, 0
                    continue
                window.append((segment, done, size))
                loaded += size * ends
                staged += size * copies if size < LARGE else 0
                done += size
        if window:
            yield self._run_tile(task, strip, row, tall, window)

    def _run_tile(
        self, task: Task, strip: Strip, row: int, tall: int, window: list[tuple[Segment, int, int]]
    ) -> Tile:
        sources, targets, reads = strip.sources, strip.targets, task.reads

        def source_at(source: int, column: int) -> int:
            return sources[source].at + row * sources[source].width + column

        wanted: list[tuple[int, int, int, int, int]] = []  # (source, at, size, index in window, which end of it)
        for index, (segment, done, size) in enumerate(window):
            at = source_at(segment.source, segment.at * tall + done) if segment.source >= 0 else 0
            wanted.append((segment.source, at, size, index, 0))
            for end, (other, column) in enumerate(segment.others, 1):
                wanted.append((other, source_at(other, column * tall + done), size, index, end))
        if len(wanted) > 1:
            wanted.sort()
        loads: list[Piece] = []
        clears: list[Clear] = []
        places: dict[tuple[int, int], int] = {}
        pos = 0
        last_source, last_end = -1, -1
        for source, at, size, index, end in wanted:
            places[index, end] = pos
            if source < 0:
                clears.append(Clear(pos, size, 1, size))
            elif source == last_source and at == last_end:
                loads[-1] = loads[-1]._replace(nbytes=loads[-1].nbytes + size)
            else:
                loads.append(Piece(reads[sources[source].extent], at, size, pos))
            last_source, last_end = source, at + size
            pos += size
        equals: list[Equal] = []
        blanks: list[Blank] = []
        outgoing: list[tuple[int, int, int, int]] = []  # (target, at, size, pos)
        for index, (segment, done, size) in enumerate(window):
            pos = places[index, 0]
            for target, column in segment.targets:
                span = targets[target]
                outgoing.append((target, span.at + row * span.width + column * tall + done, size, pos))
            if segment.blank or segment.others:
                extent = reads[sources[segment.source].extent]
                at = source_at(segment.source, segment.at * tall + done)
                if segment.blank:
                    blanks.append(Blank(pos, size, 1, size, extent, at))
                for end, (other, column) in enumerate(segment.others, 1):
                    other_at = source_at(other, column * tall + done)
                    twin = reads[sources[other].extent]
                    equals.append(Equal(pos, places[index, end], size, 1, size, size, extent, at, twin, other_at))
        stores, runs = self._gather(task, strip, outgoing)
        return Tile(loads, equals, blanks, Moves(clears, runs, ()) if clears or runs else _NOTHING, stores)

    def _gather(
        self, task: Task, strip: Strip, outgoing: list[tuple[int, int, int, int]]
    ) -> tuple[list[Piece], list[Run]]:
        """Turn outgoing pieces into few stores: what is small and adjacent in a target is put together first."""
        if len(outgoing) > 1:
            outgoing.sort()
            joined = [outgoing[0]]
            for piece in outgoing[1:]:
                target, at, size, pos = joined[-1]
                if piece[0] == target and piece[1] == at + size and piece[3] == pos + size:
                    joined[-1] = (target, at, size + piece[2], pos)
                else:
                    joined.append(piece)
            outgoing = joined
        stores: list[Piece] = []
        runs: list[Run] = []
        staged = self.load_room
        first = 0
        while first < len(outgoing):
            target, at, size, pos = outgoing[first]
            last, end = first + 1, at + size
            if size < LARGE:
                while last < len(outgoing):
                    next_target, next_at, next_size, _ = outgoing[last]
                    if next_target != target or next_at != end or next_size >= LARGE:
                        break
                    end, last = end + next_size, last + 1
            if last - first > 1:
                pos = staged
                for _, _, piece_size, piece_pos in outgoing[first:last]:
                    runs.append((piece_pos, staged, piece_size))
                    staged += piece_size
            stores.append(Piece(task.writes[strip.targets[target].extent], at, end - at, pos))
            first = last
        return stores, runs

    # -- rows --------------------------------------------------------------------------------

    def _row_tiles(self, task: Task, strip: Strip, height: int) -> Iterator[Tile]:
        route = strip.route
        for row in range(0, strip.rows, height):
            rows = min(height, strip.rows - row)
            loads, pos, starts = [], 0, []
            for span in strip.sources:
                loads.append(Piece(task.reads[span.extent], span.at + row * span.width, rows * span.width, pos))
                starts.append(pos)
                pos += rows * span.width
            stores, pos, ends = [], self.load_room, []
            for span in strip.targets:
                stores.append(Piece(task.writes[span.extent], span.at + row * span.width, rows * span.width, pos))
                ends.append(pos)
                pos += rows * span.width
            equals: list[Equal] = []
            blanks: list[Blank] = []
            if route.same or route.zeros:
                equals, blanks = self._row_checks(task, strip, row, rows, starts)
            yield Tile(loads, equals, blanks, self._row_moves(strip, rows, starts, ends), stores)

    def _row_checks(
        self, task: Task, strip: Strip, row: int, rows: int, starts: list[int]
    ) -> tuple[list[Equal], list[Blank]]:
        sources, reads = strip.sources, task.reads
        equals: list[Equal] = []
        for source, source_at, other, other_at, length in strip.route.same:
            a, b = sources[source], sources[other]
            equals.append(
                Equal(
                    starts[source] + source_at,
                    starts[other] + other_at,
                    length,
                    rows,
                    a.width,
                    b.width,
                    reads[a.extent],
                    a.at + row * a.width + source_at,
                    reads[b.extent],
                    b.at + row * b.width + other_at,
                )
            )
        blanks: list[Blank] = []
        for source, source_at, length in strip.route.zeros:
            span = sources[source]
            at = span.at + row * span.width + source_at
            blanks.append(Blank(starts[source] + source_at, length, rows, span.width, reads[span.extent], at))
        return equals, blanks

    def _row_moves(self, strip: Strip, rows: int, starts: list[int], ends: list[int]) -> Moves:
        route = strip.route
        key = (id(route), rows, tuple(s.width for s in strip.sources), tuple(t.width for t in strip.targets))
        known = self._moves.get(key)
        if known is None:
            if len(self._moves) >= 1024:
                self._moves.clear()
            clears = tuple(
                Clear(ends[target] + target_at, length, rows, strip.targets[target].width)
                for target, target_at, length in route.fills
            )
            strands: list[list[tuple[int, Strand]]] = [[] for _ in strip.targets]
            for source, source_at, target, target_at, length in route.copies:
                span = strip.sources[source]
                strands[target].append((target_at, Strand(starts[source] + source_at, length, span.width)))
            for target, target_at, length in route.fills:
                strands[target].append((target_at, Strand(-1, length, 0)))
            woven = tuple(tuple(strand for _, strand in sorted(found)) for found in strands)
            known = (route, Moves(clears, (), row_moves(strip, rows, starts, ends), rows, woven))
            self._moves[key] = known
        return known[1]

    # -- many small tasks --------------------------------------------------------------------

    def batch(self, tasks: Sequence[Task], reads: Sequence[Extent], writes: Sequence[Extent]) -> Tile:
        """One tile for several tasks that fit into the buffer together. It loads their extents whole."""
        loads, where = _packed([extent for task in tasks for extent in task.reads], reads, 0)
        stores, place = _packed([extent for task in tasks for extent in task.writes], writes, self.load_room)
        equals: list[Equal] = []
        blanks: list[Blank] = []
        clears: list[Clear] = []
        runs: list[Run] = []
        moves: list[Move] = []
        for task in tasks:
            begins = [where[extent] for extent in task.reads]
            places = [place[extent] for extent in task.writes]
            for strip in task.strips:
                rows, sources, targets, route = strip
                starts = [begins[extent] + at for extent, at, _ in sources]
                ends = [places[extent] + at for extent, at, _ in targets]
                if rows == 1:
                    for source, source_at, target, target_at, length in route.copies:
                        runs.append((starts[source] + source_at, ends[target] + target_at, length))
                elif rows:
                    moves += row_moves(strip, rows, starts, ends)
                if route.fills:
                    for target, target_at, length in route.fills:
                        clears.append(Clear(ends[target] + target_at, length, rows, targets[target].width))
                if route.same or route.zeros:
                    more_equals, more_blanks = self._row_checks(task, strip, 0, rows, starts)
                    equals += more_equals
                    blanks += more_blanks
        return Tile(loads, equals, blanks, Moves(clears, runs, moves), stores)


def _packed(wanted: list[int], extents: Sequence[Extent], pos: int) -> tuple[list[Piece], dict[int, int]]:
    """Lay extents into the buffer from ``pos`` on, in file order, so that what adjoins in a file adjoins there."""
    pieces, where = [], {}
    new = tuple.__new__  # a third of the time that Piece(...) takes, and there are very many
    for _, _, index in sorted([(extents[index].file, extents[index].offset, index) for index in wanted]):
        where[index] = pos
        nbytes = extents[index].nbytes
        pieces.append(new(Piece, (index, 0, nbytes, pos)))
        pos += nbytes
    return pieces, where


def _fills_targets(strip: Strip) -> bool:
    """Whether the route has every column of every target: rows that other strips share cannot be stored whole."""
    filled = [0] * len(strip.targets)
    for copy in strip.route.copies:
        filled[copy.target] += copy.length
    for fill in strip.route.fills:
        filled[fill.target] += fill.length
    return all(done == span.width for done, span in zip(filled, strip.targets, strict=True))


def _is_flat(strip: Strip) -> bool:
    """Whether every piece of the route is as wide as the spans at both its ends."""
    sources, targets, route = strip.sources, strip.targets, strip.route
    return (
        all(c.length == sources[c.source].width == targets[c.target].width for c in route.copies)
        and all(f.length == targets[f.target].width for f in route.fills)
        and all(s.length == sources[s.source].width == sources[s.other].width for s in route.same)
        and all(z.length == sources[z.source].width for z in route.zeros)
    )
