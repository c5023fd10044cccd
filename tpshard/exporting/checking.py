"""Checks an engine's directory: that every rank holds what the engine looks for, and every byte against the source."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from tpshard.accounting import bytes_by_rank
from tpshard.errors import DamagedError, UnsupportedError, UsageError
from tpshard.execute import execute
from tpshard.options import DEFAULTS, Options, move_settings
from tpshard.planning import Placed, build_plan
from tpshard.reports import Finding, Verification
from tpshard.verdicts import FAILED, PASSED, LevelVerdict

from .files import without
from .given import Given
from .reading import open_engine
from .sources import open_any

LEVELS = ("structure", "bytes")


def verify_engine(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    levels: Sequence[str] = (),
    engine: str | None = None,
    config: str | os.PathLike[str] | None = None,
    options: Options = DEFAULTS,
) -> Verification:
    """Check an engine's directory at the levels ``structure`` and, with ``against``, ``bytes``.

    *structure*: names, shapes and dtypes of every rank's files are those that the engine's layout of the model in
    config.json has, and constants have their values. *bytes*: every byte of every rank is the source's (a checkpoint,
    shards, or another engine's directory), replicas and padding included.

    Raises:
        UsageError: a level that is not for engines' directories, or that needs ``against``.
        UnsupportedError, DamagedError, StorageError: config.json or the source cannot be read for what they are.
    """
    wanted = tuple(levels) or (("structure", "bytes") if against is not None else ("structure",))
    for level in wanted:
        if level not in LEVELS:
            raise UsageError(
                f"the level '{level}' is for shards with a manifest; an engine's directory is checked at "
                f"{' and '.join(LEVELS)}: merge it, split it anew and verify that at the others"
            )
    if "bytes" in wanted and against is None:
        raise UsageError("the level 'bytes' compares with the source: name it with --against SRC")
    report = Verification("verify", str(path), None if against is None else str(against), 1)
    report.levels = ["structure"]
    began = time.perf_counter()
    try:
        given = open_engine(path, engine, config=config)
    except DamagedError as error:
        report.findings.append(Finding("structure", str(path), "", str(error)))
        report.verdicts.append(_verdict("structure", report.findings, began))
        report.status = 1
        return report
    report.verdicts.append(_verdict("structure", [], began))
    report.tp_size, report.files_checked = given.tp_size, len(given.files)
    report.rank_bytes = bytes_by_rank(given.placed)
    if "bytes" in wanted and against is not None:
        report.levels.append("bytes")
        began, before = time.perf_counter(), len(report.findings)
        _bytes(given, against, report, options)
        report.verdicts.append(_verdict("bytes", report.findings[before:], began))
    given.check_unchanged()
    report.passed = not report.findings
    report.status = 0 if report.passed else 1
    return report


def _require_same(mine: Placed, theirs: Placed, against: str) -> None:
    """Raise DamagedError where the source has another tensor of a name, or none."""
    for name, tensor in mine.layout.tensors.items():
        there = theirs.layout.tensors.get(name)
        if there != tensor:
            held = f"{tensor.dtype} {list(tensor.shape)}"
            other = "absent" if there is None else f"{there.dtype} {list(there.shape)}"
            raise DamagedError(f"{name} is {held} in the engine's files and {other} in {against}")


def _verdict(level: str, findings: Sequence[Finding], began: float) -> LevelVerdict:
    verdict = FAILED if findings else PASSED
    return LevelVerdict(level, verdict, findings=list(findings), seconds=time.perf_counter() - began)


def _bytes(given: Given, against: str | os.PathLike[str], report: Verification, options: Options) -> None:
    other = open_any(against)
    try:  # as the source spells its tensors, which the engine's files do not tell
        mine = given.placed if given.holding is None else given.holding(other.model)
        _require_same(mine, other.placed, str(against))
    except (DamagedError, UnsupportedError) as error:
        report.findings.append(Finding("bytes", str(against), "", f"{against} is not the source: {error}"))
        return
    dropped = {name: "" for name in other.placed.layout.tensors if name not in mine.layout.tensors}
    plan = build_plan(without(other.placed, dropped), mine)
    threads, tile = move_settings(options.threads, options.max_memory)
    targets = [(path, file.size) for path, file in zip(given.files, mine.files, strict=True)]
    with options.running(sum(extent.nbytes for extent in plan.writes)) as progress:
        outcome = execute(
            plan.tasks, plan.reads, plan.writes, list(other.files), targets, compare=True, threads=threads,
            tile_bytes=tile, algorithm=None, progress=progress,
        )  # fmt: skip
    other.check_unchanged()
    report.tensors_checked += len(plan.writes)
    report.bytes_checked += outcome.bytes_read + outcome.bytes_written
    for found in outcome.differences:
        problem = "has padding that is not zero"
        if found.other:
            problem = f"differs from {'its replica in ' if found.kind == 'replica' else ''}{found.other}"
        message = f"{found.where}: {found.tensor} {problem} (at byte {found.offset})"
        report.findings.append(Finding("bytes", found.where, found.tensor, message))
