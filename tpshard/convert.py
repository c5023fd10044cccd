"""split, reshard and merge: each names two layouts, joins them into a plan, and has it carried out.

Everything is written to a staging directory that becomes visible at once; the manifest is written
last. The functions return a report and raise; they never print or exit.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from . import manifest as manifests
from .accounting import conversion_report, logical_bytes
from .adapters import open_given
from .beside import strangers
from .checkpoint import source_files
from .degrees import axes_of, check_degree, equal_degrees, listed
from .digest import Digests
from .errors import DamagedError, UnsupportedError, UsageError
from .execute import Outcome
from .layout import cut_layout, whole_layout
from .listing import shown
from .manifest import Manifest, Origin, RankFile, SideFile
from .options import DEFAULTS, Options
from .output import Ending, Job, make
from .outputplace import check_separate
from .partition import Axis
from .place import Headed, place_native, place_opened, place_repacked, sealed
from .planning import Plan, build_plan
from .reports import Conversion
from .shards import Shards, given_path, open_shards
from .sidefiles import changed_sides, require_unchanged_sides
from .sourcefiles import reread

__all__ = ["Options", "merge", "reshard", "split"]

_INDEX = "model.safetensors.index.json"


def split(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tp_size: int,
    *,
    even: bool = False,
    copy_unknown: bool = False,
    max_file_bytes: int = 0,
    base: str | os.PathLike[str] | None = None,
    dequantize: str | None = None,
    options: Options = DEFAULTS,
) -> Conversion:
    """Cut a Hugging Face checkpoint into one file a rank.

    ``source`` is a directory or a hub id ``org/name[@revision]``. With ``even`` a degree that gives
    unequal ranks is refused; with ``copy_unknown`` tensors that no rule knows are kept whole on every
    rank. ``max_file_bytes`` numbers a rank's file into parts of at most that size. With ``base`` it is the
    PEFT LoRA adapter in ``source`` that is cut, as that base model is: its directory, shards of it, or a
    directory with its config.json alone. With ``dequantize`` (``bf16``, ``fp16``, ``fp32``) quantised matrices
    are cut as their values in that dtype, at degrees that their groups forbid as well; see :mod:`.dequantise`.

    Raises:
        UsageError: a degree below 1, or output and source overlap.
        UnsupportedError: unknown model or tensor, or a degree that the model cannot take; nothing to dequantise.
        DamagedError: the source is damaged, incomplete, or contradicts itself.
        StorageError: no space, no permission, a device error.
    """
    target = given_path(output, "the output")
    checkpoint = open_given(source, base=base, copy_unknown=copy_unknown)
    check_separate(checkpoint.source.root, target)
    values = None
    if dequantize is not None:
        from .dequantise import dequantised

        values = dequantised(checkpoint, dequantize)
        checkpoint = values.checkpoint
    opened = checkpoint.source
    check_degree(tp_size, checkpoint.axes, even=even)
    notes, dims, aliases = checkpoint.notes(), checkpoint.matched.dims, checkpoint.aliases()
    headed = place_native(cut_layout(checkpoint.tensors, dims, tp_size), max_file_bytes)
    plan = build_plan(checkpoint.placed, headed.placed)
    report = conversion_report(
        "split", str(source), str(output), family=checkpoint.family, from_tp_size=1, target=headed.placed, dims=dims,
        notes=notes, dry_run=options.dry_run,
    )  # fmt: skip
    report.copied_whole = list(checkpoint.matched.unknown)
    report.aliases = aliases
    report.left_out = list(opened.left_out)
    _warn(report, options, [*checkpoint.warnings, *_inequality(report, checkpoint.axes)])
    config_sha256 = hashlib.sha256(opened.config_raw).hexdigest()

    def ending(outcome: Outcome, sides: tuple[SideFile, ...]) -> Ending:
        opened.check_unchanged()
        if values is not None:
            sides = values.with_config(sides)
        if any(side.path == opened.config_name and side.sha256 != config_sha256 for side in sides):
            raise DamagedError(
                f"{shown(opened.root / opened.config_name)} has changed since it was read. Wait until nothing writes "
                "to it, then start again."
            )
        origin = Origin(
            opened.label,
            checkpoint.family,
            config_sha256,
            source_files(opened),
            None if opened.index is None else (opened.index.name, opened.index.raw),
            _row(outcome.read_digests, options.algorithm),
            opened.left_out,
        )
        return _native(
            plan, headed, outcome, report,
            Manifest(
                tp_size, checkpoint.tensors, dims, notes, aliases, origin, sides,
                _rank_files(plan, outcome, options.algorithm), options.algorithm, max_file_bytes,
            ),
            {} if values is None else values.small,
        )  # fmt: skip

    job = Job(
        plan, opened.root, [opened.root / file.name for file in opened.files],
        {side.path: side.size for side in opened.side_files}, _native_small(plan, opened.left_out), options.algorithm,
        ending,
    )  # fmt: skip
    if values is not None:
        sizes = {name: len(data) for name, data in values.small.items()}
        job = replace(job, small={**sizes, **job.small}, opened=values.opened)
    return make(job, target, report, options)


def reshard(
    shards: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tp_size: int,
    *,
    even: bool = False,
    max_file_bytes: int | None = None,
    from_tp_size: int | None = None,
    options: Options = DEFAULTS,
) -> Conversion:
    """Cut shards anew for another degree, without the checkpoint that they came from.

    Side files that were changed since the split are refused unless ``options.allow_changed``.
    The files are the same, byte for byte, as those of a direct split to ``tp_size``. Replicas are
    compared, padding is checked to be zero, and every tensor that is read is held against the digest
    in the manifest, whose algorithm is kept. With ``from_tp_size`` shards of any other degree are
    refused; ``max_file_bytes`` is that of the split unless given.

    Raises:
        UsageError: ``shards`` is no finished split, the degree is below 1, or output and source overlap.
        UnsupportedError: a degree that the model cannot take.
        DamagedError: a file is missing, damaged, changed, or of another split; replicas differ.
        StorageError: no space, no permission, a device error.
    """
    target = given_path(output, "the output")
    opened = open_shards(shards)
    manifest = opened.manifest
    if from_tp_size not in (None, manifest.tp_size):
        held = f"{shown(opened.root)} holds {manifest.tp_size} ranks"
        raise UsageError(f"{held}, not {from_tp_size}; correct the degree before the arrow")
    check_separate(opened.root, target)
    axes = axes_of(manifest.dims)
    check_degree(tp_size, axes, even=even)
    limit = manifest.max_file_bytes if max_file_bytes is None else max_file_bytes
    headed = place_native(cut_layout(manifest.tensors, manifest.dims, tp_size), limit)
    plan = build_plan(opened.placed, headed.placed)
    report = _shards_report("reshard", str(shards), str(output), manifest, headed, options)
    _warn(report, options, [*_changes(opened, options), *_inequality(report, axes)])

    def ending(outcome: Outcome, sides: tuple[SideFile, ...]) -> Ending:
        opened.check_unchanged()
        _require_carried(opened, sides, options)
        named, known = manifest.config_name, manifest.origin.config_sha256
        config = next((side.sha256 for side in sides if side.path == named), known)
        return _native(
            plan, headed, outcome, report,
            Manifest(
                tp_size, manifest.tensors, manifest.dims, manifest.notes, manifest.aliases,
                replace(manifest.origin, config_sha256=config), sides,
                _rank_files(plan, outcome, manifest.algorithm), manifest.algorithm, limit,
            ),
        )  # fmt: skip

    small = _native_small(plan, manifest.origin.left_out)
    return make(_shards_job(opened, plan, small, ending), target, report, options)


def merge(
    shards: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    repack_bytes: int | None = None,
    options: Options = DEFAULTS,
) -> Conversion:
    """Join shards to the checkpoint that they were cut from: the original files, byte for byte.

    Every tensor is held against the digest that was taken of the source, and side files that were
    changed since the split are refused unless ``options.allow_changed``. With ``repack_bytes`` the
    tensors are written to safetensors files of at most that size instead (0: one file).

    Raises:
        UsageError: ``shards`` is no finished split, or output and source overlap.
        UnsupportedError: ``repack_bytes`` for shards of an adapter.
        DamagedError: a file is missing, damaged, changed, or of another split; replicas differ; a tensor
            is not the source's.
        StorageError: no space, no permission, a device error.
    """
    target = given_path(output, "the output")
    opened = open_shards(shards)
    manifest = opened.manifest
    check_separate(opened.root, target)
    if repack_bytes is not None and manifest.is_adapter:
        raise UnsupportedError(
            f"{shown(opened.root)} holds shards of an adapter, which PEFT reads from one file: merge it without "
            "--max-file-size, to the file that it was"
        )
    layout = whole_layout(manifest.tensors)
    if repack_bytes is None:
        files = manifest.origin.files
        headed = Headed(place_opened(layout, [(reread(file, manifests.NAME), 0) for file in files]), ())
        frames = {file.name: file.frame for file in files}
        index = manifest.origin.index
    else:
        headed = place_repacked(layout, repack_bytes)
        frames = {file.name: ((0, header),) for file, header in zip(headed.placed.files, headed.headers, strict=True)}
        index = _new_index(headed)
    plan = build_plan(opened.placed, headed.placed)
    report = _shards_report("merge", str(shards), str(output), manifest, headed, options)
    rebuilt = [file.name for file in manifest.origin.files if file.rebuilt] if repack_bytes is None else []
    report.identical_to_source = repack_bytes is None and not rebuilt and bool(manifest.algorithm)
    stale = [f"{name} of the source also held a stale copy of a tensor; it is written without it" for name in rebuilt]
    report.left_out = list(manifest.origin.left_out)
    _warn(report, options, [*_changes(opened, options), *stale])
    small = {} if index is None else {index[0]: index[1]}

    def ending(outcome: Outcome, sides: tuple[SideFile, ...]) -> Ending:
        opened.check_unchanged()
        _require_carried(opened, sides, options)
        _require_source(manifest, outcome)
        return Ending(frames.items(), small)

    job = _shards_job(opened, plan, {name: len(data) for name, data in small.items()}, ending)
    return make(job, target, report, options)


def _shards_report(
    verb: str, shards: str, output: str, manifest: Manifest, headed: Headed, options: Options
) -> Conversion:
    report = conversion_report(
        verb, shards, output, family=manifest.origin.family, from_tp_size=manifest.tp_size, target=headed.placed,
        dims=manifest.dims, notes=manifest.notes, dry_run=options.dry_run,
    )  # fmt: skip
    report.aliases = dict(manifest.aliases)
    return report


def _shards_job(
    opened: Shards, plan: Plan, small: Mapping[str, int], ending: Callable[[Outcome, tuple[SideFile, ...]], Ending]
) -> Job:
    sides = {side.path: side.size for side in opened.manifest.side_files}
    return Job(plan, opened.root, opened.paths(), sides, small, opened.manifest.algorithm, ending, opened.expected())


def _native_small(plan: Plan, left_out: Sequence[str]) -> dict[str, int]:
    """The manifest, as large as it may get: headers of the source and the digests make up its size."""
    beside = sum(8 + 2 * len(text.encode()) for text in left_out)
    return {manifests.NAME: 65536 + 256 * len(plan.writes) + 256 * len(plan.reads) + beside}


def _native(
    plan: Plan, headed: Headed, outcome: Outcome, report: Conversion, manifest: Manifest,
    small: Mapping[str, bytes] | None = None,
) -> Ending:  # fmt: skip
    """Headers that name the weights that have passed, small files that are not the source's, and the manifest."""
    report.content = manifest.content
    frames = (
        (file.name, ((0, sealed(header, manifest.content)),))
        for file, header in zip(plan.target.files, headed.headers, strict=True)
    )
    return Ending(frames, {**(small or {}), manifests.NAME: manifests.dumped(manifest)})


def _rank_files(plan: Plan, outcome: Outcome, algorithm: str) -> tuple[RankFile, ...]:
    numbers = [array("L") for _ in plan.target.files]
    for number, extent in enumerate(plan.writes):
        numbers[extent.file].append(number)  # writes of a file come in the order in which it holds them
    return tuple(
        RankFile(file.name, file.rank, file.size, _row(map(outcome.write_digests.__getitem__, found), algorithm))
        for file, found in zip(plan.target.files, numbers, strict=True)
    )


def _row(digests: Iterable[str | None], algorithm: str) -> Sequence[str]:
    return Digests.of((digest or "" for digest in digests), algorithm) if algorithm else ()


def _require_source(manifest: Manifest, outcome: Outcome) -> None:
    """Every merged tensor has the digest that was taken of the source's."""
    if not manifest.algorithm:
        return
    for tensor, promised, found in zip(manifest.tensors, manifest.origin.digests, outcome.write_digests, strict=True):
        if promised != found:
            raise DamagedError(
                f"{tensor.name} does not come out as it was in the source: {manifest.algorithm} {found}, not "
                f"{promised}; the shards are damaged ('tpshard verify' names the file): copy them again, or split again"
            )


def _new_index(headed: Headed) -> tuple[str, bytes] | None:
    """Name and bytes of the index of repacked files; None where there is one file."""
    files = headed.placed.files
    if len(files) < 2:
        return None
    weight_map = {
        extent.tensor: files[extent.file].name for row in headed.placed.extents for extent in row if extent is not None
    }
    total = logical_bytes(headed.placed.layout)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    return _INDEX, text.encode() + b"\n"


def _changes(opened: Shards, options: Options) -> list[str]:
    """What is to be said of side files that were changed, where that is allowed, and of files that do not belong."""
    changed = list(changed_sides(opened.root, opened.manifest.side_files))
    if not options.allow_changed:
        require_unchanged_sides(opened.root, changed)
    stray = strangers(opened.root, opened.manifest).weights
    return [
        *(f"{path} was changed since the split ({what}) and is carried as it is now" for path, what in changed),
        *(f"{shown(opened.root / name)} is not one of this split's files and is not read" for name in stray),
    ]


def _require_carried(opened: Shards, sides: Sequence[SideFile], options: Options) -> None:
    """The side files that arrived are those that were promised: they may have changed while the tensors moved."""
    if not options.allow_changed:
        arrived = {side.path: side for side in sides}
        promised = [side for side in opened.manifest.side_files if arrived[side.path] != side]
        require_unchanged_sides(
            opened.root, [(side.path, "another content arrived than was promised") for side in promised]
        )


def _inequality(report: Conversion, axes: Iterable[Axis]) -> list[str]:
    if not report.uneven:
        return []
    return [
        f"the {report.to_tp_size} ranks are unequal: {'; '.join(report.uneven)}; "
        f"they are equal at {listed(equal_degrees(axes))} (--even refuses any other degree)"
    ]


def _warn(report: Conversion, options: Options, messages: Sequence[str]) -> None:
    for message in messages:
        report.warnings.append(message)
        options.note(message)
