"""Makes an output directory as a plan says: tensors, side files, headers, and the manifest or index last.

The directory becomes visible at once, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .commit import Staging
from .errors import NotProvenError, UsageError
from .execute import Outcome, execute
from .header import Frame
from .journal import Identity, Journal, plan_key, stamped
from .listing import is_weights, storage_error
from .manifest import SideFile
from .openfiles import OpenFiles
from .options import Options, move_settings
from .outputplace import check_output
from .planning import Plan
from .release import VERSION
from .reports import Conversion
from .resume import Kept, go_on, require_finished
from .sidefiles import copy_sides, require_inside
from .wholefiles import write_frame, write_new


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
        tile_bytes: the tile to move by where no bound of memory is given; None for the usual one.
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
    tile_bytes: int | None = None


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
    require_inside(job.root, job.sides)
    move_settings(options.threads, options.max_memory)
    report.needed_bytes = needed
    report.side_files = len(job.sides)
    report.algorithm = job.algorithm
    if options.dry_run:
        check_output(output, overwrite=options.overwrite, needed_bytes=needed, written=written)
        return report
    if options.resume and not job.algorithm:
        raise UsageError("--resume knows by digests what is done, and none are taken here: leave --digest none away")
    options.planned(report)
    with Staging(
        output, overwrite=options.overwrite, needed_bytes=needed, fsync=options.fsync, note=options.note,
        written=written, resume=options.resume, keep_previous=options.keep_previous,
    ) as staging:  # fmt: skip
        staging.keep = options.resume  # what is refused is not deleted either
        journal, kept = _begun(job, staging, report.verb, options)
        report.bytes_kept = kept.nbytes
        if staging.published:
            return report
        try:
            outcome = _made(job, staging.path, journal, kept, options)
            staging.publish()
        except BaseException as error:
            done = kept.nbytes or (journal is not None and journal.entries)
            staging.keep = options.resume and bool(done) and not isinstance(error, NotProvenError)
            raise
        finally:
            if journal is not None:
                journal.close()
    report.bytes_read, report.bytes_written = outcome.bytes_read, outcome.bytes_written
    options.made(job.plan, outcome)
    return report


def _begun(job: Job, staging: Staging, verb: str, options: Options) -> tuple[Journal | None, Kept]:
    """The journal of a run, and what is kept of an earlier one; none where no digests are taken."""
    if not job.algorithm:
        return None, Kept()
    computed = job.opened is not OpenFiles
    identity = _identity(job, verb, computed)
    if staging.published:
        require_finished(staging.journal, identity)
        options.note(f"{staging.out}: was finished already; the run that made it was killed right after")
        return None, Kept(nbytes=sum(extent.nbytes for extent in job.plan.writes))
    if not options.resume or not staging.journal.exists():
        if options.resume:
            options.note(f"{staging.out}: no unfinished run was found that could be gone on from; it is begun anew")
        journal = Journal(staging.journal)
        journal.begin(identity)
        return journal, Kept()
    threads, tile = move_settings(options.threads, options.max_memory)
    journal, kept = go_on(
        staging.journal, identity, job.plan, staging.path, job.files, threads=threads, tile_bytes=tile,
        computed=computed,
    )  # fmt: skip
    total = sum(extent.nbytes for extent in job.plan.writes)
    options.note(f"{staging.out}: going on; {kept.nbytes:,} of {total:,} bytes are there already, checked by digest")
    return journal, kept


def _identity(job: Job, verb: str, computed: bool) -> Identity:
    present = [path for path in job.files if os.path.exists(path)]
    if computed and len(present) < len(job.files):  # the sources of what is computed have other names
        present = sorted(path for path in job.root.iterdir() if is_weights(path.name))
    return Identity(VERSION, verb, plan_key(job.plan), job.algorithm, stamped(present))
def _made(job: Job, staging: Path, journal: Journal | None, kept: Kept, options: Options) -> Outcome:
    """Make everything that the output will hold, and have it judged."""
    outcome = _move(job, staging, journal, kept, options)
    ending = job.ending(outcome, copy_sides(job.root, staging, job.sides))
    for name, frame in ending.frames:
        write_frame(staging / name, frame)
    for name, data in ending.small.items():
        write_new(staging / name, data)
    if options.gate is not None:
        options.gate(staging)
    return outcome


def _move(job: Job, staging: Path, journal: Journal | None, kept: Kept, options: Options) -> Outcome:
    plan = job.plan
    threads, tile = move_settings(options.threads, options.max_memory)
    targets = [(staging / file.name, file.size) for file in plan.target.files]
    for path, _ in targets:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, path.parent, "making it") from None
    with options.running(sum(extent.nbytes for extent in plan.writes)) as progress:
        if progress is not None and kept.nbytes:
            progress(kept.nbytes)
        return execute(
            plan.tasks,
            plan.reads,
            plan.writes,
            job.files,
            targets,
            threads=threads,
            tile_bytes=tile or job.tile_bytes,
            algorithm=job.algorithm or None,
            expected=job.expected,
            progress=progress,
            opened=job.opened,
            record=None if journal is None else journal.record,
            earlier=kept,
        )
