"""Verification by bytes: structure, digest and bytes, each a level of its own.

*structure* holds every file's header against the manifest. *digest* hashes every stored tensor and
side file again. *bytes* re-assembles every tensor tile by tile and compares it with another copy of
the model: the source, or shards of any degree; replicas are compared with each other and padding with
zero. Bytes cannot see a table that cuts in the wrong order; only running the ranks can.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from . import manifest as manifests
from .checkpoint import place_source
from .convert import Options, file_sha256, move_settings
from .errors import UsageError
from .execute import execute, hash_extents
from .header import WeightsFile
from .manifest import Manifest
from .opened import Stamp
from .plan import Placed, build_plan
from .reports import Finding, Verification
from .shards import Shards, check_files, is_shards, open_shards, read_manifest
from .source import open_source

LEVELS = ("structure", "digest", "bytes")


def verify(
    shards: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    levels: Sequence[str] | None = None,
    options: Options = Options(),
) -> Verification:
    """Check a directory of shards at the given levels; by default at all that the call allows.

    ``against`` is the source checkpoint (a directory or hub id) or other shards of the same model; the
    level *bytes* needs it. Differences are findings of the report, not errors.

    Raises:
        UsageError: an unknown level, or *bytes* without ``against``; ``shards`` is no finished split.
        DamagedError: the manifest, or the source, cannot be read for what it is.
        StorageError: reading failed.
    """
    wanted = tuple(levels) if levels else tuple(level for level in LEVELS if level != "bytes" or against is not None)
    for level in wanted:
        if level not in LEVELS:
            raise UsageError(f"'{level}' is no level of verification; choose among {', '.join(LEVELS)}")
    if "bytes" in wanted and against is None:
        raise UsageError("the level 'bytes' compares with the source: name it with --against SRC")
    root = Path(shards)
    manifest = read_manifest(root)
    report = Verification("verify", str(shards), None if against is None else str(against), manifest.tp_size)
    opened: list[tuple[WeightsFile, Stamp]] = []
    found = [Finding("structure", p.file, "", p.message) for p in check_files(root, manifest, opened)]
    found += _side_structure(root, manifest)
    report.files_checked = len(manifest.files)
    report.levels.append("structure")
    report.findings += found
    if not found:
        whole = open_shards(root)
        if "digest" in wanted:
            report.levels.append("digest")
            _digest(whole, report, options)
        if "bytes" in wanted and against is not None:
            report.levels.append("bytes")
            _bytes(whole, against, report, options)
        whole.check_unchanged()
    missing = [level for level in wanted if level not in report.levels]
    if missing:
        report.warnings.append(f"not run because the structure is wrong: {', '.join(missing)}")
    report.passed = not report.findings and not missing
    return report


def _side_structure(root: Path, manifest: Manifest) -> list[Finding]:
    out = []
    for side in manifest.side_files:
        path = root / side.path
        if not path.is_file():
            out.append(Finding("structure", side.path, "", f"{path} is missing"))
        elif path.stat().st_size != side.size:
            out.append(
                Finding("structure", side.path, "", f"{path} has {path.stat().st_size} bytes where {side.size} were written")
            )
    return out


def _running(total: int, options: Options) -> AbstractContextManager[Callable[[int], None] | None]:
    return nullcontext() if options.progress is None else options.progress(total)


def _digest(shards: Shards, report: Verification, options: Options) -> None:
    manifest = shards.manifest
    if not manifest.algorithm:
        report.warnings.append("the shards were written without digests; only side files can be checked at this level")
    expected = shards.expected()
    extents = [extent for row in shards.placed.extents for extent in row if extent is not None]
    threads, tile = move_settings(options.threads, options.max_memory)
    if expected:
        with _running(sum(extent.nbytes for extent in extents), options) as progress:
            digests = hash_extents(
                extents, shards.paths(), threads=threads, tile_bytes=tile, algorithm=manifest.algorithm, progress=progress
            )
        report.tensors_checked += len(extents)
        report.bytes_checked += sum(extent.nbytes for extent in extents)
        for number, (extent, digest) in enumerate(zip(extents, digests, strict=True)):
            if digest != expected[number]:
                file = shards.files[extent.file].name
                message = f"{file}: {extent.tensor} has {manifest.algorithm} {digest} where {expected[number]} was written"
                report.findings.append(Finding("digest", file, extent.tensor, message))
    for side in manifest.side_files:
        if file_sha256(shards.root / side.path) != side.sha256:
            message = f"{side.path} was changed since the split (its sha256 is another)"
            report.findings.append(Finding("digest", side.path, "", message))


def _bytes(shards: Shards, against: str | os.PathLike[str], report: Verification, options: Options) -> None:
    other, paths, recheck = _other(against)
    mine, theirs = shards.placed.layout.tensors, other.layout.tensors
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) != theirs.get(name):
            here, there = (
                f"{t.dtype} {list(t.shape)}" if t is not None else "absent" for t in (mine.get(name), theirs.get(name))
            )
            report.findings.append(
                Finding("bytes", str(against), name, f"{name} is {here} in the shards and {there} in {against}")
            )
    if mine != theirs:
        return
    plan = build_plan(shards.placed, other)
    threads, tile = move_settings(options.threads, options.max_memory)
    total = sum(extent.nbytes for extent in plan.writes)
    with _running(total, options) as progress:
        outcome = execute(
            plan.tasks,
            plan.reads,
            plan.writes,
            shards.paths(),
            [(path, path.stat().st_size) for path in paths],
            compare=True,
            threads=threads,
            tile_bytes=tile,
            algorithm=None,
            progress=progress,
        )
    recheck()
    report.tensors_checked += len(plan.writes)
    report.bytes_checked += outcome.bytes_read + outcome.bytes_written
    for difference in outcome.differences:
        kinds = {
            "content": "differs from",
            "replica": "differs from its replica in",
            "padding": "has padding that is not zero, beside",
        }
        message = (
            f"{difference.where}: {difference.tensor} {kinds.get(difference.kind, 'differs from')} {difference.other} "
            f"at byte {difference.offset}"
        )
        report.findings.append(Finding("bytes", difference.where, difference.tensor, message))


def _other(against: str | os.PathLike[str]) -> tuple[Placed, list[Path], Callable[[], None]]:
    """The other side of a comparison: its placed layout, its files, and how to see that they stayed the same."""
    if is_shards(against):
        shards = open_shards(against)
        return shards.placed, shards.paths(), shards.check_unchanged
    source = open_source(against)
    return place_source(source), [source.root / file.name for file in source.files], source.check_unchanged
