"""Makes plans for the byte mover's tests, and moves them the slow and plain way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from tpshard.execute import execute
from tpshard.routing import Copy, Extent, Route, Same, Span, Strip, Task

GAP = 24  # bytes of "header" before and between extents


class Plan:
    """Tasks in the making; extents are appended file by file, and files are made by :meth:`write_sources`."""

    def __init__(self, sources: int, targets: int) -> None:
        self.tasks: list[Task] = []
        self.reads: list[Extent] = []
        self.writes: list[Extent] = []
        self.source_ends = [GAP] * sources
        self.target_ends = [GAP] * targets

    def read(self, file: int, nbytes: int, name: str = "") -> int:
        self.reads.append(Extent(name or f"t{len(self.reads)}", file, self.source_ends[file], nbytes))
        self.source_ends[file] += nbytes
        return len(self.reads) - 1

    def write(self, file: int, nbytes: int, name: str = "") -> int:
        self.writes.append(Extent(name or f"t{len(self.writes)}", file, self.target_ends[file], nbytes))
        self.target_ends[file] += nbytes
        return len(self.writes) - 1

    def task(self, strips: Sequence[Strip], name: str = "") -> Task:
        """A task of strips whose spans name extents of the plan; the task's own list them in that order."""
        reads = list(dict.fromkeys(span.extent for strip in strips for span in strip.sources))
        writes = list(dict.fromkeys(span.extent for strip in strips for span in strip.targets))
        own = tuple(
            strip._replace(
                sources=tuple(span._replace(extent=reads.index(span.extent)) for span in strip.sources),
                targets=tuple(span._replace(extent=writes.index(span.extent)) for span in strip.targets),
            )
            for strip in strips
        )
        self.tasks.append(Task(name or f"task{len(self.tasks)}", own, tuple(reads), tuple(writes)))
        return self.tasks[-1]

    def split(self, rows: int, widths: Sequence[int]) -> None:
        """One source tensor, cut by columns for target files 0, 1, ...; one row is a column-parallel cut."""
        total = sum(widths)
        source = self.read(0, rows * total)
        targets = [self.write(file, rows * width) for file, width in enumerate(widths)]
        copies, at = [], 0
        for target, width in enumerate(widths):
            copies.append(Copy(0, at, target, 0, width))
            at += width
        spans = tuple(Span(target, 0, width) for target, width in zip(targets, widths, strict=True))
        self.task([Strip(rows, (Span(source, 0, total),), spans, Route(tuple(copies)))])

    def merge(self, rows: int, widths: Sequence[int]) -> None:
        total = sum(widths)
        sources = [self.read(file, rows * width) for file, width in enumerate(widths)]
        target = self.write(0, rows * total)
        copies, at = [], 0
        for source, width in enumerate(widths):
            copies.append(Copy(source, 0, 0, at, width))
            at += width
        spans = tuple(Span(source, 0, width) for source, width in zip(sources, widths, strict=True))
        self.task([Strip(rows, spans, (Span(target, 0, total),), Route(tuple(copies)))])

    def replicate(self, nbytes: int, copies: int) -> None:
        source = self.read(0, nbytes)
        targets = [self.write(file, nbytes) for file in range(copies)]
        route = Route(tuple(Copy(0, 0, target, 0, nbytes) for target in range(copies)))
        self.task([Strip(1, (Span(source, 0, nbytes),), tuple(Span(t, 0, nbytes) for t in targets), route)])

    def collapse(self, nbytes: int, copies: int) -> None:
        """The same tensor in every source file, which must be equal, to one target."""
        sources = [self.read(file, nbytes, "norm.weight") for file in range(copies)]
        target = self.write(0, nbytes, "norm.weight")
        route = Route(
            (Copy(0, 0, 0, 0, nbytes),), same=tuple(Same(0, 0, other, 0, nbytes) for other in range(1, copies))
        )
        self.task([Strip(1, tuple(Span(s, 0, nbytes) for s in sources), (Span(target, 0, nbytes),), route)])

    def fuse(self, parts: int, ranks: int, nbytes: int) -> None:
        """``ranks`` sources of ``parts`` blocks each become one target with each part whole ([gate; up])."""
        sources = [self.read(file, parts * nbytes) for file in range(ranks)]
        target = self.write(0, parts * ranks * nbytes)
        copies = [
            Copy(rank, part * nbytes, 0, (part * ranks + rank) * nbytes, nbytes)
            for rank in range(ranks)
            for part in range(parts)
        ]
        spans = tuple(Span(source, 0, parts * nbytes) for source in sources)
        self.task([Strip(1, spans, (Span(target, 0, parts * ranks * nbytes),), Route(tuple(copies)))])

    def write_sources(self, folder: Path, data: bytes | None = None) -> tuple[list[Path], list[tuple[Path, int]]]:
        sources = []
        for file, end in enumerate(self.source_ends):
            path = folder / f"in-{file}.bin"
            path.write_bytes(os.urandom(end) if data is None else data[:end])
            sources.append(path)
        return sources, [(folder / f"out-{file}.bin", end) for file, end in enumerate(self.target_ends)]


def moved(plan: Plan, sources: Sequence[Path]) -> tuple[list[bytes], list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the targets' bytes, and where replicas differ or padding isn't zero: (read extent, first offset)."""
    held = [path.read_bytes() for path in sources]
    out = [bytearray(end) for end in plan.target_ends]
    replicas: dict[int, int] = {}
    padding: dict[int, int] = {}

    def where(span: Span, listed: Sequence[int], extents: Sequence[Extent], row: int, column: int) -> tuple[int, int]:
        extent = extents[listed[span.extent]]
        return extent.file, extent.offset + span.at + row * span.width + column

    for task in plan.tasks:
        for rows, ins, outs, route in task.strips:
            for row in range(rows):
                for source, source_at, target, target_at, length in route.copies:
                    file, a = where(ins[source], task.reads, plan.reads, row, source_at)
                    to, b = where(outs[target], task.writes, plan.writes, row, target_at)
                    out[to][b : b + length] = held[file][a : a + length]
                for source, source_at, other, other_at, length in route.same:
                    file, a = where(ins[source], task.reads, plan.reads, row, source_at)
                    to, b = where(ins[other], task.reads, plan.reads, row, other_at)
                    for step in range(length):
                        if held[file][a + step] != held[to][b + step]:
                            extent = task.reads[ins[other].extent]
                            offset = b + step - plan.reads[extent].offset
                            replicas[extent] = min(offset, replicas.get(extent, offset))
                for source, source_at, length in route.zeros:
                    file, a = where(ins[source], task.reads, plan.reads, row, source_at)
                    for step in range(length):
                        if held[file][a + step]:
                            extent = task.reads[ins[source].extent]
                            offset = a + step - plan.reads[extent].offset
                            padding[extent] = min(offset, padding.get(extent, offset))
    return [bytes(data) for data in out], sorted(replicas.items()), sorted(padding.items())


def digests(extents: Sequence[Extent], files: Sequence[bytes], algorithm: str = "xxh3_128") -> list[str]:
    one = xxhash.xxh3_128_hexdigest if algorithm == "xxh3_128" else lambda data: hashlib.sha256(data).hexdigest()
    return [one(files[e.file][e.offset : e.offset + e.nbytes]) for e in extents]


def run(plan, folder, **kwargs):
    """Make the source files in ``folder`` and execute the plan; return the outcome, the sources and the targets."""
    sources, targets = plan.write_sources(folder)
    outcome = execute(plan.tasks, plan.reads, plan.writes, sources, targets, **kwargs)
    return outcome, sources, targets


def check(plan, folder, **kwargs):
    """Execute, compare with the plain way, then compare in compare mode; return the outcome."""
    outcome, sources, targets = run(plan, folder, **kwargs)
    want, _, _ = moved(plan, sources)
    assert [path.read_bytes() for path, _ in targets] == want
    assert outcome.write_digests == digests(plan.writes, want)
    assert outcome.bytes_written == sum(extent.nbytes for extent in plan.writes)
    again = execute(plan.tasks, plan.reads, plan.writes, sources, targets, compare=True, **kwargs)
    assert again.differences == []
    assert (again.read_digests, again.write_digests) == (outcome.read_digests, outcome.write_digests)
    return outcome, sources
