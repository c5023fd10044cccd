"""split, reshard and merge: each names two layouts, joins them into a plan, and has it carried out.

Everything is written to a staging directory that becomes visible at once; the manifest is written
last. The functions return a report and raise; they never print or exit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import manifest as manifests
from .accounting import conversion_report
from .adapters import open_given
from .axes import Axis
from .beside import strangers
from .checkpoint import Checkpoint, source_files
from .degrees import axes_of, check_degree, equal_degrees, listed
from .ending import digest_row, digested_files, native_ending, native_small
from .errors import DamagedError, UnsupportedError, UsageError
from .execute import Outcome
from .header import WeightsFile
from .layout import cut_layout, whole_layout
from .listing import shown
from .manifest import Manifest, Origin, SideFile
from .options import DEFAULTS, Options
from .output import Ending, Job, make
from .outputplace import check_separate
from .place import Headed, place_native, place_opened, place_repacked, repacked_index
from .planning import Plan, build_plan
from .quantised import is_forbidden_by_groups, values_at
from .reports import Conversion
from .shards import Shards, given_path, open_shards
from .sidefiles import changed_sides, require_unchanged_sides
from .sourcefiles import reread

if TYPE_CHECKING:
    from .dequantise import Dequantised

__all__ = ["Options", "merge", "reshard", "split"]



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
    ends = _Ends("split", str(source), given_path(output, "the output"), str(output))
    checkpoint = open_given(source, base=base, copy_unknown=copy_unknown)
    if dequantize is None:
        return _cut(ends, checkpoint, None, tp_size, even, max_file_bytes, options)
    from .dequantise import dequantised

    values = dequantised(checkpoint, dequantize)
    return _cut(ends, values.checkpoint, values, tp_size, even, max_file_bytes, options)


class _Ends(NamedTuple):
    """What a conversion is called, and where it leads from and to."""

    verb: str
    source: str
    target: Path
    output: str
    from_tp_size: int = 1


def _cut(
    ends: _Ends, checkpoint: Checkpoint, values: Dequantised | None, tp_size: int, even: bool, max_file_bytes: int,
    options: Options, check_sides: Callable[[tuple[SideFile, ...]], None] | None = None,
) -> Conversion:  # fmt: skip
    """Cut a checkpoint, or with ``values`` what its source computes."""
    check_separate(checkpoint.source.root, ends.target)
    opened = checkpoint.source
    try:
        check_degree(tp_size, checkpoint.axes, even=even)
    except UnsupportedError as error:
        way_out = values_at(opened.config) if values is None else ""
        if not way_out or not is_forbidden_by_groups(str(error), checkpoint.axes):
            raise
        raise UnsupportedError(f"{error}; {way_out}") from None
    notes, dims, aliases = checkpoint.notes(), checkpoint.matched.dims, checkpoint.aliases()
    headed = place_native(cut_layout(checkpoint.tensors, dims, tp_size), max_file_bytes)
    plan = build_plan(checkpoint.placed, headed.placed)
    report = conversion_report(
        ends.verb, ends.source, ends.output, family=checkpoint.family, from_tp_size=ends.from_tp_size,
        target=headed.placed, dims=dims, notes=notes, dry_run=options.dry_run,
    )  # fmt: skip
    report.copied_whole = list(checkpoint.matched.unknown)
    report.aliases = aliases
    report.left_out = list(opened.left_out)
    _warn(report, options, [*checkpoint.warnings, *_inequality(report, checkpoint.axes)])
    config_sha256 = hashlib.sha256(opened.config_raw).hexdigest()

    def ending(outcome: Outcome, sides: tuple[SideFile, ...]) -> Ending:
        opened.check_unchanged()
        if check_sides is not None:
            check_sides(sides)
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
            digest_row(outcome.read_digests, options.algorithm),
            opened.left_out,
        )
        return native_ending(
            plan, headed, outcome, report,
            Manifest(
                tp_size, checkpoint.tensors, dims, notes, aliases, origin, sides,
                digested_files(plan, outcome, options.algorithm), options.algorithm, max_file_bytes,
            ),
            {} if values is None else values.small,
        )  # fmt: skip

    job = Job(
        plan, opened.root, [opened.root / file.name for file in opened.files],
        {side.path: side.size for side in opened.side_files}, native_small(plan, opened.left_out), options.algorithm,
        ending,
    )  # fmt: skip
    if values is not None:
        job = values.job(job)
    return make(job, ends.target, report, options)


def reshard(
    shards: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tp_size: int,
    *,
    even: bool = False,
    max_file_bytes: int | None = None,
    from_tp_size: int | None = None,
    dequantize: str | None = None,
    options: Options = DEFAULTS,
) -> Conversion:
    """Cut shards anew for another degree, without the checkpoint that they came from.

    Side files that were changed since the split are refused unless ``options.allow_changed``.
    The files are the same, byte for byte, as those of a direct split to ``tp_size``. Replicas are
    compared, padding is checked to be zero, and every tensor that is read is held against the digest
    in the manifest, whose algorithm is kept. With ``from_tp_size`` shards of any other degree are
    refused; ``max_file_bytes`` is that of the split unless given. With ``dequantize`` the shards of a quantised
    checkpoint are cut as their values, to what :func:`split` makes with it of the checkpoint.

    Raises:
        UsageError: ``shards`` is no finished split, the degree is below 1, or output and source overlap.
        UnsupportedError: a degree that the model cannot take; nothing to dequantise.
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
    limit = manifest.max_file_bytes if max_file_bytes is None else max_file_bytes
    if dequantize is not None:
        from .dequantise import dequantised_shards

        changes = _changes(opened, options)
        values = dequantised_shards(opened, dequantize, options, changes)
        ends = _Ends("reshard", str(shards), target, str(output), manifest.tp_size)
        own = replace(options, algorithm=manifest.algorithm)
        return _cut(ends, values.checkpoint, values, tp_size, even, limit, own, partial(_carried, opened, options))
    axes = axes_of(manifest.dims)
    check_degree(tp_size, axes, even=even)
    headed = place_native(cut_layout(manifest.tensors, manifest.dims, tp_size), limit)
    plan = build_plan(opened.placed, headed.placed)
    report = _shards_report("reshard", str(shards), str(output), manifest, headed, options)
    _warn(report, options, [*_changes(opened, options), *_inequality(report, axes)])

    def ending(outcome: Outcome, sides: tuple[SideFile, ...]) -> Ending:
        opened.check_unchanged()
        _carried(opened, options, sides)
        named, known = manifest.config_name, manifest.origin.config_sha256
        config = next((side.sha256 for side in sides if side.path == named), known)
        return native_ending(
            plan, headed, outcome, report,
            Manifest(
                tp_size, manifest.tensors, manifest.dims, manifest.notes, manifest.aliases,
                replace(manifest.origin, config_sha256=config), sides,
                digested_files(plan, outcome, manifest.algorithm), manifest.algorithm, limit,
            ),
        )  # fmt: skip

    small = native_small(plan, manifest.origin.left_out)
    return make(_shards_job(opened, plan, small, ending), target, report, options)


def merge(
    shards: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    repack_bytes: int | None = None,
    dequantize: str | None = None,
    options: Options = DEFAULTS,
) -> Conversion:
    """Join shards to the checkpoint that they were cut from: the original files, byte for byte.

    Every tensor is held against the digest that was taken of the source, and side files that were
    changed since the split are refused unless ``options.allow_changed``. With ``repack_bytes`` the
    tensors are written to safetensors files of at most that size instead (0: one file). With ``dequantize``
    (as in :func:`split`) quantised matrices are joined as their values.

    Raises:
        UsageError: ``shards`` is no finished split, or output and source overlap.
        UnsupportedError: ``repack_bytes`` for shards of an adapter; nothing to dequantise.
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
    changes = _changes(opened, options)
    values = None
    if dequantize is not None:
        from .dequantise import dequantised_shards

        values = dequantised_shards(opened, dequantize, options, changes)
    given = opened.placed if values is None else values.checkpoint.placed
    layout = whole_layout(given.layout.tensors.values())
    if repack_bytes is None:
        files, index = values.files() if values is not None else _original_files(manifest)
        headed = Headed(place_opened(layout, [(file, 0) for file in files]), ())
        frames = {file.name: file.frame for file in files}
    else:
        headed = place_repacked(layout, repack_bytes)
        frames = {file.name: ((0, header),) for file, header in zip(headed.placed.files, headed.headers, strict=True)}
        index = repacked_index(headed)
    plan = build_plan(given, headed.placed)
    report = _shards_report("merge", str(shards), str(output), manifest, headed, options)
    original = repack_bytes is None and values is None
    rebuilt = [file.name for file in manifest.origin.files if file.rebuilt] if original else []
    report.identical_to_source = original and not rebuilt and bool(manifest.algorithm)
    stale = [f"{name} of the source also held a stale copy of a tensor; it is written without it" for name in rebuilt]
    if values is not None:
        stale = list(values.checkpoint.warnings)
    report.left_out = list(manifest.origin.left_out if values is None else values.checkpoint.source.left_out)
    _warn(report, options, [*(changes if values is None else ()), *stale])
    small = {} if index is None else {index[0]: index[1]}

    def ending(outcome: Outcome, sides: tuple[SideFile, ...]) -> Ending:
        opened.check_unchanged()
        _carried(opened, options, sides)
        if values is None:
            _require_source(manifest, outcome)
        return Ending(frames.items(), small)

    job = _shards_job(opened, plan, {name: len(data) for name, data in small.items()}, ending)
    if values is not None:
        small |= values.small
        job = values.job(job)
    return make(job, target, report, options)


def _original_files(manifest: Manifest) -> tuple[list[WeightsFile], tuple[str, bytes] | None]:
    """The files that were cut, and their index."""
    return [reread(file, manifests.NAME) for file in manifest.origin.files], manifest.origin.index


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


def _carried(opened: Shards, options: Options, sides: Sequence[SideFile]) -> None:
    """The side files that arrived are those that were promised: they may have changed while the tensors moved."""
    if not options.allow_changed:
        arrived = {side.path: side for side in sides}
        promised = [side for side in opened.manifest.side_files if arrived.get(side.path, side) != side]
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
