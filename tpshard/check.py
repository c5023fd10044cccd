"""Verification by bytes: structure, digest and bytes, each a level of its own.

*structure* holds every file's header against the manifest, and looks for files that do not belong.
*digest* hashes every stored tensor and side file again. *bytes* cuts another copy of the model (the
source, or shards of any degree) anew, tile by tile, and compares every rank's tensors with that,
replicas and padding included, and the side files with its own. Bytes cannot see a table that cuts in
the wrong order; only running the ranks can.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from .beside import compare_sides, config_structure, side_structure, strangers
from .checkpoint import place_source
from .errors import UsageError
from .execute import execute
from .findings import Difference
from .layout import Layout
from .listing import shown
from .manifest import Manifest
from .openfiles import OpenFiles
from .options import DEFAULTS, Options, move_settings
from .planning import Placed, build_plan
from .rehash import differing_digests
from .reports import Finding, Verification
from .shards import Shards, check_files, given_path, is_shards, open_shards, read_manifest
from .sidefiles import file_sha256
from .source import open_source
from .valued import values_of_shards, values_of_source
from .verdicts import FAILED, NOT_RUN, PASSED, LevelVerdict

if TYPE_CHECKING:
    from .dequantise import Dequantised

LEVELS = ("structure", "digest", "bytes")
BROKEN = "not run because the structure is wrong"


def verify(
    shards: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    levels: Sequence[str] | None = None,
    options: Options = DEFAULTS,
) -> Verification:
    """Check a directory of shards at the given levels; by default at all that the call allows.

    ``against`` is the source checkpoint (a directory or hub id) or other shards of the same model; the
    level *bytes* needs it. Differences are findings of the report, not errors.

    Raises:
        UsageError: an unknown level, or *bytes* without ``against``; ``shards`` is no finished split.
        DamagedError: the manifest, or the source, cannot be read for what it is.
        StorageError: reading failed.
    """
    asked = tuple(levels or ())
    wanted = asked or tuple(level for level in LEVELS if level != "bytes" or against is not None)
    for level in wanted:
        if level not in LEVELS:
            raise UsageError(f"'{level}' is no level of verification; choose among {', '.join(LEVELS)}")
    if "bytes" in wanted and against is None:
        raise UsageError("the level 'bytes' compares with the source: name it with --against SRC")
    root = given_path(shards, "the shards")
    manifest = read_manifest(root)
    report = Verification("verify", str(shards), None if against is None else str(against), manifest.tp_size)
    with _level("structure", report):
        checked = check_files(root, manifest)
        report.findings += [Finding("structure", p.file, "", p.message) for p in checked.problems]
        report.findings += side_structure(root, manifest)
        broken = bool(report.findings)  # nothing else can be looked at; what follows leaves the tensors readable
        report.findings += config_structure(root, manifest)
        beside = strangers(root, manifest)
        report.findings += [
            Finding("structure", name, "", f"{shown(root / name)} is not one of this split's files; remove it")
            for name in beside.weights
        ]
        report.files_checked = len(manifest.files)
    report.warnings += beside.notes()
    if not broken:
        whole = checked.shards(root, manifest)
        if "digest" in wanted:
            with _level("digest", report):
                _digest(whole, report, options)
            if not manifest.algorithm:
                _without_digests(report)
        if "bytes" in wanted and against is not None:
            with _level("bytes", report):
                _bytes(whole, against, report, options)
        whole.check_unchanged()
    missing = [level for level in wanted if level not in report.levels]
    if missing and broken:
        report.warnings.append(f"{BROKEN}: {', '.join(missing)}")
    report.passed = not report.findings and not any(level in asked for level in missing)
    report.status = 0 if report.passed else 1
    return report


@contextmanager
def _level(level: str, report: Verification) -> Iterator[None]:
    """A level under way: when it ends, the findings that it added become its verdict."""
    began, before = time.perf_counter(), len(report.findings)
    report.levels.append(level)
    yield
    found = report.findings[before:]
    seconds = time.perf_counter() - began
    report.verdicts.append(LevelVerdict(level, FAILED if found else PASSED, findings=found, seconds=seconds))


def _without_digests(report: Verification) -> None:
    """Where no digest was taken, side files alone can fail the level, and nothing can pass it."""
    verdict = report.verdicts[-1]
    if verdict.verdict == PASSED:
        verdict.verdict = NOT_RUN
        verdict.notes.append("the shards were written without digests (--digest none): only side files were checked")
        report.levels.remove("digest")


def _digest(shards: Shards, report: Verification, options: Options) -> None:
    manifest = shards.manifest
    if manifest.algorithm:
        report.findings += differing_digests(shards, options)
        held = [extent.nbytes for row in shards.placed.extents for extent in row if extent is not None]
        report.tensors_checked += len(held)
        report.bytes_checked += sum(held)
    for side in manifest.side_files:
        if file_sha256(shards.root / side.path) != side.sha256:
            message = f"{side.path} was changed since the split (its sha256 is another)"
            report.findings.append(Finding("digest", side.path, "", message))


def _bytes(shards: Shards, against: str | os.PathLike[str], report: Verification, options: Options) -> None:
    other = _other(against, shards.manifest)
    report.findings += compare_sides(shards.root, shards.manifest, other.root, other.sides, against, other.small)
    differing = _differing("bytes", shards.placed.layout, other.placed.layout, against)
    if differing:
        report.findings += differing
        return
    # The shards are the target: so every rank's copy is compared, and a difference names the file that is checked.
    plan = build_plan(other.placed, shards.placed)
    threads, tile = move_settings(options.threads, options.max_memory)
    total = sum(extent.nbytes for extent in plan.writes)
    with options.running(total) as progress:
        outcome = execute(
            plan.tasks,
            plan.reads,
            plan.writes,
            other.paths,
            [(path, file.size) for path, file in zip(shards.paths(), shards.manifest.files, strict=True)],
            compare=True,
            threads=threads,
            tile_bytes=tile,
            algorithm=None,
            progress=progress,
            opened=other.opened,
        )
    other.recheck()
    report.tensors_checked += len(plan.writes)
    report.bytes_checked += outcome.bytes_read + outcome.bytes_written
    report.findings += [_finding(difference) for difference in outcome.differences]


def compare_headers(manifest: Manifest, against: str | os.PathLike[str]) -> list[Finding]:
    """Tensors whose name, dtype or shape is another in the source (or other shards); no weights are read.

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: ``against`` cannot be read for what it is.
    """
    return _differing("structure", manifest.layout, _other(against, manifest).placed.layout, against)


def _differing(level: str, here: Layout, there: Layout, against: str | os.PathLike[str]) -> list[Finding]:
    mine, theirs, name_of = here.tensors, there.tensors, str(against)
    found = []
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) != theirs.get(name):
            held, other = (
                f"{t.dtype} {list(t.shape)}" if t is not None else "absent" for t in (mine.get(name), theirs.get(name))
            )
            found.append(Finding(level, name_of, name, f"{name} is {held} in the shards and {other} in {name_of}"))
    return found


def _finding(difference: Difference) -> Finding:
    """A difference as a finding. A byte that should be padding has no file that it comes from."""
    where, name, other = difference.where, difference.tensor, difference.other
    if difference.kind == "replica":
        what = f"differs from its replica in {other}"
    elif difference.kind == "content" and other:
        what = f"differs from {other}"
    else:
        what = "has padding that is not zero"
    return Finding("bytes", where, name, f"{where}: {name} {what} (at byte {difference.offset})")


class _Other(NamedTuple):
    """The other side of a comparison; ``recheck`` sees whether its files stayed the same.

    Of a quantised checkpoint whose values were cut, it is these.
    """

    placed: Placed
    paths: list[Path]
    recheck: Callable[[], None]
    root: Path
    sides: list[str]
    opened: Callable[[Sequence[Path], Sequence[bool]], OpenFiles] = OpenFiles
    small: Mapping[str, bytes] = MappingProxyType({})  # files that are not on disk there


def _other(against: str | os.PathLike[str], manifest: Manifest) -> _Other:
    if is_shards(against):
        shards = open_shards(against)
        values = values_of_shards(shards, manifest)
        if values is not None:
            return _computed(values)
        sides = [side.path for side in shards.manifest.side_files]
        return _Other(shards.placed, shards.paths(), shards.check_unchanged, shards.root, sides)
    source = open_source(against, adapter=manifest.is_adapter)
    values = values_of_source(source, manifest)
    if values is not None:
        return _computed(values)
    paths = [source.root / file.name for file in source.files]
    sides = [side.path for side in source.side_files]
    return _Other(place_source(source), paths, source.check_unchanged, source.root, sides)


def _computed(values: Dequantised) -> _Other:
    source = values.checkpoint.source
    return _Other(
        values.checkpoint.placed, [source.root / file.name for file in source.files], source.check_unchanged,
        source.root, [side.path for side in source.side_files], values.opened, values.small,
    )  # fmt: skip
