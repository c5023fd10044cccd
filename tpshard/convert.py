"""split, reshard and merge: each names two layouts, joins them into a plan, and has it carried out.

Everything is written to a staging directory that becomes visible at once; the manifest is written
last. The functions return a report and raise; they never print or exit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from . import manifest as manifests
from .checkpoint import Checkpoint, open_checkpoint, source_files
from .commit import Staging, check_output, check_separate, copy_side_file
from .degrees import axes_of, check_degree, describe_uneven, paddings, uneven
from .errors import DamagedError, UsageError
from .execute import Outcome, execute
from .layout import Layout, cut_layout, whole_layout
from .listing import storage_error
from .manifest import Manifest, Note, Origin, RankFile, SideFile, reread
from .partition import Dim
from .place import Headed, place_native, place_opened, place_repacked, sealed
from .plan import Placed, PlacedFile, Plan, build_plan, stored_bytes
from .reports import Conversion, sharded_fraction
from .shards import Shards, open_shards
from .table import ADDED_ONCE, NEEDS_SUM, template_of

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Options:
    """How an output is made; the same for split, reshard and merge.

    Args:
        overwrite: replace an existing output directory.
        dry_run: plan and check everything, write nothing.
        threads: how many move bytes; default two to four.
        max_memory: bytes of buffers for all threads together.
        algorithm: digest of the tensors: ``xxh3_128``, ``sha256``, or "" for none.
        fsync: wait until the data is on the device before the output becomes visible.
        note: called with messages for the user as they come up.
        progress: given the bytes to be written, a context manager around a function that is called
            with bytes done.
    """

    overwrite: bool = False
    dry_run: bool = False
    threads: int | None = None
    max_memory: int | None = None
    algorithm: str = "xxh3_128"
    fsync: bool = False
    note: Callable[[str], None] = field(default=lambda message: None)
    progress: Progress | None = None


def split(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tp_size: int,
    *,
    even: bool = False,
    copy_unknown: bool = False,
    max_file_bytes: int = 0,
    options: Options = Options(),
) -> Conversion:
    """Cut a Hugging Face checkpoint into one file a rank.

    ``source`` is a directory or a hub id ``org/name[@revision]``. With ``even`` a degree that gives
    unequal ranks is refused; with ``copy_unknown`` tensors that no rule knows are kept whole on every
    rank. ``max_file_bytes`` numbers a rank's file into parts of at most that size.

    Raises:
        UsageError: a degree below 1, or output and source overlap.
        UnsupportedError: unknown model or tensor, or a degree that the model cannot take.
        DamagedError: the source is damaged, incomplete, or contradicts itself.
        StorageError: no space, no permission, a device error.
    """
    checkpoint = open_checkpoint(source, copy_unknown=copy_unknown)
    check_separate(checkpoint.source.root, Path(output))
    check_degree(tp_size, checkpoint.axes, even=even)
    for warning in checkpoint.warnings:
        options.note(warning)
    layout = cut_layout(checkpoint.tensors, checkpoint.matched.dims, tp_size)
    headed = place_native(layout, max_file_bytes)
    plan = build_plan(checkpoint.placed, headed.placed)
    report = _report(
        "split", str(source), output, checkpoint.family, 1, plan, checkpoint.matched.dims, checkpoint.notes(), options
    )
    report.copied_whole = list(checkpoint.matched.unknown)
    report.aliases = checkpoint.aliases()
    report.left_out = list(checkpoint.source.left_out)
    report.warnings += checkpoint.warnings
    sides = {side.path: side.size for side in checkpoint.source.side_files}
    source_root = checkpoint.source.root

    def origin(outcome: Outcome) -> Origin:
        checkpoint.source.check_unchanged()
        return Origin(
            checkpoint.source.label,
            checkpoint.family,
            hashlib.sha256(checkpoint.source.config_raw).hexdigest(),
            source_files(checkpoint.source),
            None if checkpoint.source.index is None else (checkpoint.source.index.name, checkpoint.source.index.raw),
            _digests(outcome.read_digests, options.algorithm),
        )

    job = _NativeJob(
        plan, headed, checkpoint.notes(), checkpoint.matched.dims, checkpoint.aliases(), origin, options.algorithm,
        max_file_bytes, [source_root / file.name for file in checkpoint.source.files], source_root, sides, {},
    )
    return _make_native(job, Path(output), report, options)


def reshard(
    shards: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tp_size: int,
    *,
    even: bool = False,
    max_file_bytes: int | None = None,
    from_tp_size: int | None = None,
    options: Options = Options(),
) -> Conversion:
    """Cut shards anew for another degree, without the checkpoint that they came from.

    The files are the same, byte for byte, as those of a direct split to ``tp_size``. Replicas are
    compared, padding is checked to be zero, and every tensor that is read is held against the digest
    in the manifest. With ``from_tp_size`` shards of any other degree are refused.

    Raises:
        UsageError: ``shards`` is no finished split, the degree is below 1, or output and source overlap.
        UnsupportedError: a degree that the model cannot take.
        DamagedError: a file is missing, damaged, or of another split; replicas differ.
        StorageError: no space, no permission, a device error.
    """
    opened = open_shards(shards)
    manifest = opened.manifest
    if from_tp_size not in (None, manifest.tp_size):
        raise UsageError(f"{shards} holds {manifest.tp_size} ranks, not {from_tp_size}; correct the degree before the arrow")
    check_separate(opened.root, Path(output))
    check_degree(tp_size, axes_of(manifest.dims), even=even)
    limit = manifest.max_file_bytes if max_file_bytes is None else max_file_bytes
    headed = place_native(cut_layout(manifest.tensors, manifest.dims, tp_size), limit)
    plan = build_plan(opened.placed, headed.placed)
    report = _report(
        "reshard", str(shards), output, manifest.origin.family, manifest.tp_size, plan, manifest.dims, manifest.notes, options
    )
    report.aliases = dict(manifest.aliases)
    report.warnings += _changed_sides(opened, options)

    def origin(outcome: Outcome) -> Origin:
        opened.check_unchanged()
        return manifest.origin

    job = _NativeJob(
        plan, headed, manifest.notes, manifest.dims, manifest.aliases, origin, manifest.algorithm, limit,
        opened.paths(), opened.root, {side.path: side.size for side in manifest.side_files}, opened.expected(),
    )
    return _make_native(job, Path(output), report, options)


def merge(
    shards: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    repack_bytes: int | None = None,
    options: Options = Options(),
) -> Conversion:
    """Join shards to the checkpoint that they were cut from: the original files, byte for byte.

    Every tensor is held against the digest that was taken of the source. With ``repack_bytes`` the
    tensors are written to safetensors files of at most that size instead (0: one file).

    Raises:
        UsageError: ``shards`` is no finished split, or output and source overlap.
        DamagedError: a file is missing, damaged, or of another split; replicas differ; a tensor is not
            the source's.
        StorageError: no space, no permission, a device error.
    """
    opened = open_shards(shards)
    manifest = opened.manifest
    check_separate(opened.root, Path(output))
    layout = whole_layout(manifest.tensors)
    headed = _original(manifest, layout) if repack_bytes is None else place_repacked(layout, repack_bytes)
    plan = build_plan(opened.placed, headed.placed)
    report = _report(
        "merge", str(shards), output, manifest.origin.family, manifest.tp_size, plan, manifest.dims, manifest.notes, options
    )
    report.warnings += _changed_sides(opened, options)
    rebuilt = [file.name for file in manifest.origin.files if file.rebuilt]
    report.identical_to_source = repack_bytes is None and not rebuilt and bool(manifest.algorithm)
    for name in rebuilt if repack_bytes is None else ():
        report.warnings.append(f"{name} of the source also held a stale copy of a tensor; it is written without it")
        options.note(report.warnings[-1])
    extra = _index_files(manifest, headed, repack=repack_bytes is not None)
    sides = {side.path: side.size for side in manifest.side_files}
    needed = sum(file.size for file in headed.placed.files) + sum(sides.values()) + sum(map(len, extra.values()))
    report.needed_bytes = needed
    report.side_files = len(sides)
    report.files = [file.name for file in headed.placed.files]
    if options.dry_run:
        check_output(Path(output), overwrite=options.overwrite, needed_bytes=needed)
        return report
    with Staging(
        Path(output), overwrite=options.overwrite, needed_bytes=needed, fsync=options.fsync, note=options.note
    ) as staging:
        outcome = _carry_out(plan, opened.paths(), staging.path, opened.expected(), manifest.algorithm, options)
        opened.check_unchanged()
        _require_source(manifest, outcome)
        _copy_sides(opened.root, staging.path, sides)
        frames = (
            {file.name: file.frame for file in manifest.origin.files}
            if repack_bytes is None
            else {file.name: ((0, header),) for file, header in zip(headed.placed.files, headed.headers, strict=True)}
        )
        for name, frame in frames.items():
            _write_frame(staging.path / name, frame)
        for name, data in extra.items():
            _write_new(staging.path / name, data)
        staging.publish()
    report.bytes_read, report.bytes_written = outcome.bytes_read, outcome.bytes_written
    return report


@dataclass(frozen=True)
class _NativeJob:
    """All that making a native output takes, whatever it is made from."""

    plan: Plan
    headed: Headed
    notes: Mapping[str, Note]
    dims: Mapping[str, tuple[Dim, ...]]
    aliases: Mapping[str, str]
    origin: Callable[[Outcome], Origin]
    algorithm: str
    max_file_bytes: int
    sources: Sequence[Path]
    side_root: Path
    sides: Mapping[str, int]
    expected: Mapping[int, str]


def _make_native(job: _NativeJob, output: Path, report: Conversion, options: Options) -> Conversion:
    files = job.headed.placed.files
    taken = {file.name for file in files} | {manifests.NAME}
    for path in job.sides:
        if path.split("/")[0] in taken:
            raise UsageError(f"the source holds a file named {path}, which the output needs for itself; rename it")
    # The manifest is small beside the data; headers of the source and the digests make up its size.
    manifest_bytes = 65536 + 256 * len(job.plan.writes) + 256 * len(job.plan.reads)
    needed = sum(file.size for file in files) + sum(job.sides.values()) + manifest_bytes
    report.needed_bytes = needed
    report.side_files = len(job.sides)
    report.files = [file.name for file in files]
    report.algorithm = job.algorithm
    if options.dry_run:
        check_output(output, overwrite=options.overwrite, needed_bytes=needed)
        return report
    with Staging(
        output, overwrite=options.overwrite, needed_bytes=needed, fsync=options.fsync, note=options.note
    ) as staging:
        outcome = _carry_out(job.plan, job.sources, staging.path, job.expected, job.algorithm, options)
        origin = job.origin(outcome)
        side_files = _copy_sides(job.side_root, staging.path, job.sides)
        manifest = Manifest(
            job.plan.target.layout.size,
            tuple(job.plan.target.layout.tensors.values()),
            job.dims,
            job.notes,
            job.aliases,
            origin,
            tuple(side_files),
            _rank_files(job, outcome),
            job.algorithm,
            job.max_file_bytes,
        )
        for file, header in zip(files, job.headed.headers, strict=True):
            _write_frame(staging.path / file.name, ((0, sealed(header, manifest.content)),))
        _write_new(staging.path / manifests.NAME, manifests.dumped(manifest))
        staging.publish()
    report.bytes_read, report.bytes_written = outcome.bytes_read, outcome.bytes_written
    report.content = manifest.content
    return report


def _carry_out(
    plan: Plan,
    sources: Sequence[Path],
    staging: Path,
    expected: Mapping[int, str],
    algorithm: str,
    options: Options,
) -> Outcome:
    threads, tile = move_settings(options.threads, options.max_memory)
    targets = [(staging / file.name, file.size) for file in plan.target.files]
    for path, _ in targets:
        path.parent.mkdir(parents=True, exist_ok=True)
    total = sum(extent.nbytes for extent in plan.writes)

    def run(progress: Callable[[int], None] | None) -> Outcome:
        return execute(
            plan.tasks, plan.reads, plan.writes, sources, targets,
            threads=threads, tile_bytes=tile, algorithm=algorithm or None, expected=expected, progress=progress,
        )

    if options.progress is None:
        return run(None)
    with options.progress(total) as progress:
        return run(progress)


def move_settings(threads: int | None, max_memory: int | None) -> tuple[int | None, int | None]:
    """Threads and tile size that keep the buffers within ``max_memory`` bytes.

    Raises:
        UsageError: so little memory that nothing can be moved, or no thread.
    """
    if threads is not None and not 1 <= threads <= 256:
        raise UsageError(f"{threads} threads make no sense; choose 1 to 256")
    if max_memory is None:
        return threads, None
    if max_memory < 1 << 20:
        raise UsageError(f"--max-memory of {max_memory} bytes is too little to work in; give at least 1 MiB")
    many = threads or 2
    return many, min(max(max_memory // (4 * many), 1 << 16), 1 << 23)


def _report(
    verb: str,
    source: str,
    output: str | os.PathLike[str],
    family: str,
    from_tp_size: int,
    plan: Plan,
    dims: Mapping[str, tuple[Dim, ...]],
    notes: Mapping[str, Note],
    options: Options,
) -> Conversion:
    layout = plan.target.layout
    axes = list(axes_of(dims))
    rank_bytes = bytes_by_rank(plan.target)
    report = Conversion(
        verb,
        source=source,
        output=str(output),
        family=family,
        from_tp_size=from_tp_size,
        to_tp_size=layout.size,
        tensors=len(layout.tensors),
        dry_run=options.dry_run,
        rank_bytes=rank_bytes,
        sharded_fraction=sharded_fraction(rank_bytes, logical_bytes(layout)),
        layout=layout.digest,
    )
    if layout.size > 1:
        report.uneven = [describe_uneven(found) for found in uneven(axes, layout.size)]
        report.padding = [f"{found.units} padded {found.axis.noun}" for found in paddings(axes, layout.size)]
    report.needs_sum = patterns(notes, NEEDS_SUM)
    report.added_once = patterns(notes, ADDED_ONCE)
    return report


def patterns(notes: Mapping[str, Note], text: str) -> list[str]:
    """The name patterns of the tensors whose note is ``text``, each once."""
    return list(dict.fromkeys(template_of(name)[0] for name, note in notes.items() if note.text == text))


def bytes_by_rank(placed: Placed) -> list[int]:
    """Bytes of tensors that every rank stores."""
    held = [0] * placed.layout.size
    for row in placed.extents:
        for rank, extent in enumerate(row):
            held[rank] += extent.nbytes if extent else 0
    return held


def logical_bytes(layout: Layout) -> int:
    """Bytes of all logical tensors, each once and without padding."""
    return sum(stored_bytes(tensor.shape, tensor.dtype) for tensor in layout.tensors.values())


def _digests(found: Sequence[str | None], algorithm: str) -> tuple[str, ...]:
    return tuple(digest or "" for digest in found) if algorithm else ()


def _rank_files(job: _NativeJob, outcome: Outcome) -> tuple[RankFile, ...]:
    digests: list[list[tuple[int, str]]] = [[] for _ in job.headed.placed.files]
    for extent, digest in zip(job.plan.writes, outcome.write_digests, strict=True):
        digests[extent.file].append((extent.offset, digest or ""))
    return tuple(
        RankFile(file.name, file.rank, file.size, tuple(d for _, d in _in_order(found)) if job.algorithm else ())
        for file, found in zip(job.headed.placed.files, digests, strict=True)
    )


def _in_order(found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return sorted(found, key=lambda item: item[0])  # stable: empty tensors keep their order


def _original(manifest: Manifest, layout: Layout) -> Headed:
    """The source's own files: every tensor where it lay."""
    files = [(reread(file, manifests.NAME), 0) for file in manifest.origin.files]
    return Headed(place_opened(layout, files), ())


def _require_source(manifest: Manifest, outcome: Outcome) -> None:
    """Every merged tensor has the digest that was taken of the source's."""
    if not manifest.algorithm:
        return
    for tensor, promised, found in zip(manifest.tensors, manifest.origin.digests, outcome.write_digests, strict=True):
        if promised != found:
            raise DamagedError(
                f"{tensor.name} does not come out as it was in the source: {manifest.algorithm} {found}, not {promised}; "
                "the shards are damaged ('tpshard verify' names the file): copy them again, or split again"
            )


def _index_files(manifest: Manifest, headed: Headed, *, repack: bool) -> dict[str, bytes]:
    """The index of the merged files: the source's own, or a new one where they were packed anew."""
    if not repack:
        return {} if manifest.origin.index is None else {manifest.origin.index[0]: manifest.origin.index[1]}
    files: Sequence[PlacedFile] = headed.placed.files
    if len(files) < 2:
        return {}
    weight_map = {
        extent.tensor: files[extent.file].name for row in headed.placed.extents for extent in row if extent is not None
    }
    total = logical_bytes(headed.placed.layout)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    return {"model.safetensors.index.json": text.encode() + b"\n"}


def _changed_sides(opened: Shards, options: Options) -> list[str]:
    """Side files that are missing or no longer what the split carried: said, not refused."""
    out = []
    for side in opened.manifest.side_files:
        path = opened.root / side.path
        if not path.is_file():
            raise DamagedError(f"{path} is missing; copy it again from where the shards came from")
        if path.stat().st_size != side.size or file_sha256(path) != side.sha256:
            out.append(f"{side.path} was changed since the split and is carried as it is now")
            options.note(out[-1])
    return out


def file_sha256(path: Path) -> str:
    """sha256 of a file, hex.

    Raises:
        StorageError: it cannot be read.
    """
    state = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(1 << 20):
                state.update(block)
    except OSError as error:
        raise storage_error(error, path, "reading it") from None
    return state.hexdigest()


def _copy_sides(root: Path, staging: Path, sides: Mapping[str, int]) -> list[SideFile]:
    out = []
    for path in sides:
        size = copy_side_file(root / path, staging / path, inside=staging)
        out.append(SideFile(path, size, file_sha256(staging / path)))
    return out


def _write_frame(path: Path, frame: Sequence[tuple[int, bytes]]) -> None:
    """Write the bytes of an existing file that are not tensor data."""
    try:
        with open(path, "r+b", buffering=0) as file:
            for at, data in frame:
                file.seek(at)
                _write_all(file.write, data)
    except OSError as error:
        raise storage_error(error, path, "writing its header") from None


def _write_new(path: Path, data: bytes) -> None:
    try:
        with open(path, "xb", buffering=0) as file:
            _write_all(file.write, data)
    except OSError as error:
        raise storage_error(error, path, "writing it") from None


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[write(rest) or 0 :]
