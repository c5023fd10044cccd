"""Makes an output directory as a plan says: tensors, side files, headers, and the manifest or index last.

The directory becomes visible at once, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .commit import Staging
from .errors import UsageError
from .execute import Outcome, execute
from .header import Frame
from .listing import storage_error
from .manifest import SideFile
from .openfiles import OpenFiles
from .options import Options, move_settings
from .outputplace import check_output
from .planning import Plan
from .reports import Conversion
from .sidefiles import copy_sides


@dataclass(frozen=True)
class Ending:
    """What is written once the tensors have passed: the files' other bytes, then whole small files in order.

    ``frames`` are (file, bytes), made as they are written: headers of many tensors on many ranks are large.
    """

    frames: Iterable[tuple[str, Frame]]
    small: Mapping[str, bytes]


@dataclass(frozen=True)
class Job:
    """All that making an output takes.

    Args:
        plan: what moves where; its target files are made in the output.
        root: the directory that is read.
        files: the plan's source files, in its order.
        sides: sizes in bytes of the side files to carry, by path relative to ``root``.
        small: sizes in bytes, at most, of the small files that ``ending`` gives, by name.
        algorithm: the digest to take while bytes pass, "" for none.
        ending: called when all tensors and side files are written; checks them, and says what remains.
        expected: promised digests by the number of the plan's read.
        opened: makes the files that are read and written; sources may be computed.
    """

    plan: Plan
    root: Path
    files: Sequence[Path]
    sides: Mapping[str, int]
    small: Mapping[str, int]
    algorithm: str
    ending: Callable[[Outcome, tuple[SideFile, ...]], Ending]
    expected: Mapping[int, str] = field(default_factory=dict)
    opened: Callable[[Sequence[Path], Sequence[bool]], OpenFiles] = OpenFiles


def make(job: Job, output: Path, report: Conversion, options: Options) -> Conversion:
    """Carry out the job, or with ``dry_run`` only check that it can be; returns the completed report.

    Raises:
        UsageError: the output is taken, or a side file has a name that the output needs.
        DamagedError: the source changed or is not what was promised.
        StorageError: no space, no permission, a device error.
    """
    files = job.plan.target.files
    taken = {file.name for file in files} | set(job.small)
    for path in job.sides:
        if path in taken or path.split("/")[0] in taken:
            raise UsageError(f"the source holds a file named {path}, which the output needs for itself; rename it")
    written = taken | set(job.sides)
    needed = sum(file.size for file in files) + sum(job.sides.values()) + sum(job.small.values())
    move_settings(options.threads, options.max_memory)
    report.needed_bytes = needed
    report.side_files = len(job.sides)
    report.algorithm = job.algorithm
    if options.dry_run:
        check_output(output, overwrite=options.overwrite, needed_bytes=needed, written=written)
        return report
    with Staging(
        output, overwrite=options.overwrite, needed_bytes=needed, fsync=options.fsync, note=options.note,
        written=written,
    ) as staging:
        outcome = _move(job, staging.path, options)
        ending = job.ending(outcome, copy_sides(job.root, staging.path, job.sides))
        for name, frame in ending.frames:
            _write_frame(staging.path / name, frame)
        for name, data in ending.small.items():
            _write_new(staging.path / name, data)
        if options.gate is not None:
            options.gate(staging.path)
        staging.publish()
    report.bytes_read, report.bytes_written = outcome.bytes_read, outcome.bytes_written
    return report


def _move(job: Job, staging: Path, options: Options) -> Outcome:
    plan = job.plan
    threads, tile = move_settings(options.threads, options.max_memory)
    targets = [(staging / file.name, file.size) for file in plan.target.files]
    for path, _ in targets:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, path.parent, "making it") from None
    with options.running(sum(extent.nbytes for extent in plan.writes)) as progress:
        return execute(
            plan.tasks,
            plan.reads,
            plan.writes,
            job.files,
            targets,
            threads=threads,
            tile_bytes=tile,
            algorithm=job.algorithm or None,
            expected=job.expected,
            progress=progress,
            opened=job.opened,
        )


def _write_frame(path: Path, frame: Frame) -> None:
    """Write the bytes of an existing file that are not tensor data."""
    try:
        with path.open("r+b", buffering=0) as file:
            for at, data in frame:
                file.seek(at)
                _write_all(file.write, data)
    except OSError as error:
        raise storage_error(error, path, "writing its header") from None


def _write_new(path: Path, data: bytes) -> None:
    try:
        with path.open("xb", buffering=0) as file:
            _write_all(file.write, data)
    except OSError as error:
        raise storage_error(error, path, "writing it") from None


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[write(rest) or 0 :]
