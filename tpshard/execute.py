"""Moves the bytes as a plan says: each source byte read once, each target byte written once.

A task (one logical tensor for all ranks) is done by one thread, tile by tile, in a buffer that is
allocated once; small tasks that follow each other in the source are done together in one tile.
Digests are taken while the bytes pass, in ascending order; where a column map turns the order
round, the extent is read once more at the end of its task, from the page cache. The outcome doesn't
depend on the number of threads or the size of a tile.

Memory: ``threads`` x 2 x ``tile_bytes`` (4 x when comparing), whatever the size of the model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .digest import Stream, Taken, digest_of, new_hasher
from .errors import DamagedError, UsageError
from .findings import Difference, Findings, origin
from .mover import Ends, Mover
from .openfiles import OpenFiles
from .routing import Extent, Task
from .schedule import NUMPY_COST, NumpyImport, Queue, Unit, cost_without_numpy, units_of
from .tiles import Tiler

TILE_BYTES = 1 << 20
_TICK = 0.1  # seconds between calls of `progress`

Progress = Callable[[int], None]
Record = Callable[[Sequence[int], Sequence[str], Sequence[int], Sequence[str]], None]
"""Told of what a unit of work has written and read: numbers of extents, and their digests."""


class Earlier(Protocol):
    """What an earlier run did: digests by the number of the write and of the read, and target files that exist."""

    @property
    def writes(self) -> Mapping[int, str]: ...

    @property
    def reads(self) -> Mapping[int, str]: ...

    @property
    def files(self) -> Collection[int]: ...


@dataclass(frozen=True)
class Outcome:
    """What :func:`execute` did. Digests are hex, aligned with the plan's reads and writes."""

    read_digests: Sequence[str | None]  # None where no strip reads the extent whole, or without an algorithm
    write_digests: Sequence[str | None]  # when comparing: of what the targets hold
    differences: list[Difference]  # when comparing: by file, tensor and kind
    bytes_read: int  # of source tensors; reading an extent again for its digest doesn't count
    bytes_written: int  # or compared


def default_threads() -> int:
    """Two to four threads, as many as there are processors for this process."""
    try:
        available = len(os.sched_getaffinity(0))
    except AttributeError:
        available = os.cpu_count() or 2
    return max(2, min(4, available))


def execute(
    tasks: Sequence[Task],
    reads: Sequence[Extent],
    writes: Sequence[Extent],
    sources: Sequence[Path],
    targets: Sequence[tuple[Path, int]],
    *,
    compare: bool = False,
    threads: int | None = None,
    tile_bytes: int | None = None,
    algorithm: str | None = "xxh3_128",
    expected: Mapping[int, str] | None = None,
    progress: Progress | None = None,
    opened: Callable[[Sequence[Path], Sequence[bool]], OpenFiles] = OpenFiles,
    record: Record | None = None,
    earlier: Earlier | None = None,
) -> Outcome:
    """Carry out ``tasks`` and return what was read and written, with digests.

    ``targets`` are paths and final sizes in bytes. They are created here and must not exist; bytes
    outside the writes (headers) are left zero for the caller. With ``compare`` nothing is written:
    targets are existing files, and what would be written is compared with what they hold.
    ``expected`` maps an index of ``reads`` to the digest that was promised for it. ``progress`` is
    called in the calling thread, some ten times a second, with the bytes written or compared since.
    ``opened`` makes the files that are read and written, where sources are computed and not only read.
    ``record`` is called by the threads as units of work are done. Tasks whose writes ``earlier`` names are not
    done again, and of the targets those that it names exist already; the outcome's bytes are those of this run.

    Raises DamagedError where replicas differ, padding isn't zero, a digest isn't the promised one
    (when comparing these become differences) or a file ends early; StorageError for what the
    operating system reports; UsageError for impossible settings. After an error the targets are
    incomplete, and it is the caller's part to remove them.
    """
    threads, tile = _settings(threads, tile_bytes, tasks)
    findings = Findings() if compare else None
    paths = [*sources, *(path for path, _ in targets)]
    files = opened(paths, [False] * len(sources) + [not compare] * len(targets))
    try:
        ends = Ends(reads, writes, files, len(sources), findings, compare)
        if not compare:
            for file, (_, nbytes) in enumerate(targets, len(sources)):
                if earlier is None or file - len(sources) not in earlier.files:
                    files.create(file, nbytes)
        run = _Run(ends, tile, algorithm, expected or {}, record=record)
        if earlier is not None:
            tasks = run.without(earlier, tasks)
        units = units_of(tasks, reads, writes, tile, threads)
        _work(units, threads, run, progress)
    finally:
        files.close()
    return Outcome(
        run.read_digests,
        run.write_digests,
        [] if findings is None else _with_origins(findings, tasks, reads, sources),
        sum(mover.bytes_read for mover in run.movers),
        sum(mover.bytes_written for mover in run.movers),
    )


def hash_extents(
    extents: Sequence[Extent],
    paths: Sequence[Path],
    *,
    threads: int | None = None,
    tile_bytes: int | None = None,
    algorithm: str = "xxh3_128",
    progress: Progress | None = None,
) -> list[str]:
    """Return the hex digest of every extent, each read once from ``paths[extent.file]``.

    Raises DamagedError where a file ends early and StorageError for what the operating system reports.
    """
    tasks = [Task(extent.tensor, (), (index,), ()) for index, extent in enumerate(extents)]
    threads, tile = _settings(threads, tile_bytes, tasks)
    files = OpenFiles(paths, [False] * len(paths))
    try:
        ends = Ends(extents, (), files, len(paths), None, False)
        run = _Run(ends, tile, algorithm, {}, hash_only=True)
        _work(units_of(tasks, extents, (), tile, threads), threads, run, progress)
    finally:
        files.close()
    return [digest or "" for digest in run.read_digests]


def _settings(threads: int | None, tile_bytes: int | None, tasks: Sequence[Task]) -> tuple[int, int]:
    threads = default_threads() if threads is None else threads
    tile = TILE_BYTES if tile_bytes is None else tile_bytes
    if threads < 1:
        raise UsageError(f"{threads} threads cannot move anything: give 1 or more")
    if tile < 1:
        raise UsageError(f"a tile of {tile} bytes holds nothing: give 1 byte or more")
    # a byte and all its replicas must fit, or no tile makes headway
    most_ends = max((len(strip.sources) + len(strip.targets) for task in tasks for strip in task.strips), default=1)
    return threads, max(tile, most_ends + 1)


class _Run:
    """One call of :func:`execute`, as its threads share it."""

    def __init__(
        self, ends: Ends, tile: int, algorithm: str | None, expected: Mapping[int, str], hash_only: bool = False,
        record: Record | None = None,
    ) -> None:  # fmt: skip
        self.ends = ends
        self.tile = tile
        self.expected = expected
        self.hash_only = hash_only
        self.record = record
        self.algorithm = algorithm
        self.new = new_hasher(algorithm) if algorithm else None
        self.digest = digest_of(algorithm) if algorithm else None
        self.read_digests = Taken(len(ends.reads), algorithm)
        self.write_digests = Taken(len(ends.writes), algorithm)
        self.movers: list[Mover] = []
        self.stop = threading.Event()

    def without(self, earlier: Earlier, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks that an earlier run has not done; the digests of those that it has are taken over."""
        for taken, known in ((self.read_digests, earlier.reads), (self.write_digests, earlier.writes)):
            for extent, digest in known.items():
                taken[extent] = digest
        return [task for task in tasks if not task.writes or any(write not in earlier.writes for write in task.writes)]

    def do(self, unit: Unit, mover: Mover, tiler: Tiler) -> None:
        self._do(unit, mover, tiler)
        if self.record is not None and not self.stop.is_set():
            writes = [write for task in unit.tasks for write in task.writes]
            reads = [read for task in unit.tasks for read in task.reads if self.read_digests[read] is not None]
            written, read = ([taken[n] or "" for n in numbers] for taken, numbers in (
                (self.write_digests, writes), (self.read_digests, reads)
            ))  # fmt: skip
            self.record(writes, written, reads, read)

    def _do(self, unit: Unit, mover: Mover, tiler: Tiler) -> None:
        if unit.together:
            self._do_together(unit.tasks, mover, tiler)
            return
        for task in unit.tasks:
            if self.hash_only:
                for extent in task.reads:
                    self.read_digests[extent] = self._whole(mover, extent, self.ends.reads, 0)
                    mover.bytes_written += self.ends.reads[extent].nbytes
            else:
                self._do_large(task, mover, tiler)

    def _do_together(self, tasks: list[Task], mover: Mover, tiler: Tiler) -> None:
        tile = tiler.batch(tasks, self.ends.reads, self.ends.writes)
        mover.load(tile.loads)
        digest, view = self.digest, mover.view
        if digest is not None:
            where = {extent: (pos, pos + nbytes) for extent, _, nbytes, pos in tile.loads}
            for task in tasks:
                for extent in task.reads if self.hash_only else tiler.wholly_read(task, self.ends.reads):
                    begin, end = where[extent]
                    self.read_digests[extent] = found = digest(view[begin:end])
                    if self.expected:
                        self._check_digest(extent, found)
        mover.check(tile)
        mover.rearrange(tile.inside)
        mover.store(tile.stores)
        if digest is not None:
            held = mover.held
            for extent, _, nbytes, pos in tile.stores:
                self.write_digests[extent] = digest(held[pos : pos + nbytes])
        if self.hash_only:
            mover.bytes_written += sum(piece.nbytes for piece in tile.loads)

    def _do_large(self, task: Task, mover: Mover, tiler: Tiler) -> None:
        reading: dict[int, Stream] = {}
        writing: dict[int, Stream] = {}
        if self.new is not None:
            reads, writes = self.ends.reads, self.ends.writes
            reading = {extent: Stream(self.new(), reads[extent].nbytes) for extent in tiler.wholly_read(task, reads)}
            writing = {extent: Stream(self.new(), writes[extent].nbytes) for extent in task.writes}
        view, held, stopped = mover.view, mover.held, self.stop.is_set
        for strip in task.strips:
            for tile in tiler.tiles(task, strip):
                if stopped():
                    return
                mover.load(tile.loads)
                if reading:
                    for extent, at, nbytes, pos in tile.loads:
                        stream = reading.get(extent)
                        if stream is not None:
                            stream.feed(at, view[pos : pos + nbytes])
                mover.check(tile)
                weave = mover.woven(tile.inside) if tile.inside.rows else None
                if weave is not None:
                    for piece, views in zip(tile.stores, weave, strict=True):
                        data = b"".join(views)
                        if writing:
                            writing[piece.extent].feed(piece.at, memoryview(data))
                        mover.store_bytes(piece, data)
                    continue
                mover.rearrange(tile.inside)
                mover.store(tile.stores)
                if writing:
                    for extent, at, nbytes, pos in tile.stores:
                        writing[extent].feed(at, held[pos : pos + nbytes])
        for extent, stream in reading.items():
            self.read_digests[extent] = found = stream.hexdigest() or self._whole(mover, extent, self.ends.reads, 0)
            if self.expected:
                self._check_digest(extent, found)
        for extent, stream in writing.items():
            self.write_digests[extent] = stream.hexdigest()
            if self.write_digests[extent] is None:
                self.write_digests[extent] = self._whole(mover, extent, self.ends.writes, self.ends.first_target)

    def _whole(self, mover: Mover, extent: int, extents: Sequence[Extent], first_file: int) -> str | None:
        """Read an extent from beginning to end, for its digest only."""
        assert self.new is not None
        _, file, offset, nbytes = extents[extent]
        return mover.stream(file + first_file, offset, Stream(self.new(), nbytes), self.stop)

    def _check_digest(self, extent: int, found: str | None) -> None:
        promised = self.expected.get(extent)
        if promised is None or found is None or promised == found:
            return
        stored = self.ends.reads[extent]
        path = self.ends.files.paths[stored.file]
        if self.ends.findings is None:
            raise DamagedError(
                f"{stored.tensor}: its bytes in {path} have the {self.algorithm} digest {found}, but {promised} was "
                "recorded when it was written: the file was changed or damaged since. Write or fetch it again."
            )
        self.ends.findings.add(extent, Difference(stored.tensor, "digest", path.name, promised, 0))


def _work(units: list[Unit], threads: int, run: _Run, progress: Progress | None) -> None:
    """Run the units on ``threads`` threads; re-raise the first error of any of them."""
    wanted = cost_without_numpy(units, run.tile) > NUMPY_COST
    numpy = NumpyImport(wanted)
    queue = Queue(units)
    failures: list[BaseException] = []
    idle = threading.Semaphore(0)

    def body() -> None:
        try:
            mover = Mover(run.ends, 2 * run.tile)
            run.movers.append(mover)
            tiler = Tiler(run.tile, run.tile)
            while not run.stop.is_set():
                unit = queue.next(numpy.module is not None or not wanted)
                if unit is None:
                    return
                if unit.strided:
                    numpy.wait()
                mover.numpy = numpy.module
                run.do(unit, mover, tiler)
        except BaseException as problem:
            failures.append(problem)
            run.stop.set()
        finally:
            idle.release()

    workers = [
        threading.Thread(target=body, name=f"tpshard-{number}", daemon=True)
        for number in range(min(threads, len(units)))
    ]
    reported = 0

    def report() -> None:
        nonlocal reported
        if progress is not None:
            moved = sum(mover.bytes_written for mover in run.movers)
            if moved > reported:
                progress(moved - reported)
                reported = moved

    try:
        for worker in workers:
            worker.start()
        for _ in workers:
            if progress is None:
                idle.acquire()
            else:
                while not idle.acquire(timeout=_TICK):
                    report()
        if not failures:
            report()
    except BaseException:  # also what a signal raises here: the workers end after the tile at hand
        run.stop.set()
        raise
    finally:
        for worker in workers:
            if worker.ident is not None:
                worker.join()
    if failures:
        raise failures[0]


def _with_origins(
    findings: Findings, tasks: Sequence[Task], reads: Sequence[Extent], sources: Sequence[Path]
) -> list[Difference]:
    """Name in each content difference the source file that its first byte comes from."""
    wrong = findings.by_write()
    if wrong:
        for task in tasks:
            for write in task.writes:
                if write in wrong:
                    read = origin(task, write, wrong[write].offset)
                    if read is not None:
                        findings.name_origin(write, sources[reads[read].file].name)
    return findings.sorted()
