"""What a checkpoint or a directory of shards is, and what each degree would cost, before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .accounting import bytes_by_rank, patterns
from .adapters import open_given
from .axes import Axis, Dim
from .checkpoint import Checkpoint, place_source
from .config import CONFIG
from .degrees import (
    axes_of,
    check_degree,
    describe_held_whole,
    describe_padding,
    describe_uneven,
    equal_degrees,
    held_whole,
    largest_degree,
    paddings,
    uneven,
)
from .errors import LayoutError, UnsupportedError, UsageError
from .header import DTYPE_BITS
from .layout import cut_layout
from .lora import lora_config
from .manifest import Note
from .matching import Logical
from .place import place_native
from .planning import Placed, build_plan, stored_bytes
from .registry import families
from .reports import Degree, Entry, Listing, Survey, sharded_fraction
from .shards import Shards, is_shards, open_shards
from .source import is_adapter, open_source
from .table import ADDED_ONCE, NEEDS_SUM


def inspect(
    path: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None, copy_unknown: bool = False
) -> Survey:
    """Say what a checkpoint, an adapter or a directory of shards is, and which degrees it can be cut to.

    ``base`` names the base model of an adapter, from which its degrees follow.

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: it cannot be read for what it is.
    """
    if is_shards(path):
        return _of_shards(path, open_shards(path))
    if base is None and is_adapter(path):
        return _of_adapter(path)
    from .exporting.sources import is_engines

    if base is None and is_engines(path):
        return _of_engine(path)
    return _of_checkpoint(path, open_given(path, base=base, copy_unknown=copy_unknown))


def _of_adapter(path: str | os.PathLike[str]) -> Survey:
    """What can be told of an adapter without its base model."""
    source = open_source(path, adapter=True)
    config = lora_config(source.config)
    survey = _survey(str(path), "adapter", "LoRA adapter", tuple(place_source(source).layout.tensors.values()), {}, {})
    survey.largest_degree, survey.equal_degrees = 0, []
    survey.files = [file.name for file in source.files]
    survey.left_out = list(source.left_out)
    named = f" ({config.base!r:.200} by its config)" if config.base else ""
    survey.warnings = [*source.warnings, f"its degrees follow from its base model{named}: name that with --base"]
    return survey


def _of_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> Survey:
    source = checkpoint.source
    kind = "checkpoint" if source.config_name == CONFIG else "adapter"
    survey = _survey(str(path), kind, checkpoint.family, checkpoint.tensors, checkpoint.axes, checkpoint.notes())
    survey.model_type = str(source.config.get("model_type", ""))
    survey.files = [file.name for file in source.files]
    survey.aliases = checkpoint.aliases()
    survey.copied_whole = list(checkpoint.matched.unknown)
    survey.left_out = list(source.left_out)
    survey.warnings = list(checkpoint.warnings)
    return survey


def _of_shards(path: str | os.PathLike[str], shards: Shards) -> Survey:
    manifest = shards.manifest
    axes = axes_of(manifest.dims)
    survey = _survey(str(path), "shards", manifest.origin.family, manifest.tensors, axes, manifest.notes)
    survey.tp_size = manifest.tp_size
    survey.files = [file.name for file in manifest.files]
    survey.aliases = dict(manifest.aliases)
    survey.degrees = [_degree(manifest.tp_size, axes, bytes_by_rank(shards.placed), survey.bytes)]
    return survey


def _of_engine(path: str | os.PathLike[str]) -> Survey:
    """What can be told of an engine's directory: the model in it; its degrees are those of the checkpoint."""
    from .exporting.reading import open_engine

    given = open_engine(path)
    matched = given.model.matched
    notes = {name: Note(rule.role, rule.note) for name, rule in matched.rules.items()}
    axes = axes_of(matched.dims)
    survey = _survey(str(path), given.what, given.model.family, given.model.tensors, axes, notes)
    survey.model_type = given.model.config.model_type
    survey.tp_size = given.tp_size
    survey.files = [file.name for file in given.files]
    survey.left_out, survey.warnings = list(given.left_out), list(given.warnings)
    return survey


def plan(
    path: str | os.PathLike[str],
    tp_sizes: Sequence[int],
    *,
    even: bool = False,
    base: str | os.PathLike[str] | None = None,
    copy_unknown: bool = False,
) -> Survey:
    """Like :func:`inspect`, with the cost of every degree in ``tp_sizes``; impossible ones say why.

    ``path`` is a checkpoint, an adapter with its ``base`` model, or a directory of shards.

    Raises:
        UsageError: no degree, or one below 1.
        UnsupportedError, DamagedError, StorageError: as :func:`inspect`.
    """
    if not tp_sizes:
        raise UsageError("name at least one degree, as in --tp 2,4,8")
    if is_shards(path):
        shards = open_shards(path)
        survey, placed, dims = _of_shards(path, shards), shards.placed, shards.manifest.dims
    else:
        checkpoint = open_given(path, base=base, copy_unknown=copy_unknown)
        survey, placed, dims = _of_checkpoint(path, checkpoint), checkpoint.placed, checkpoint.matched.dims
    axes = axes_of(dims)
    survey.verb = "plan"
    survey.degrees = []
    for tp_size in tp_sizes:
        try:
            check_degree(tp_size, axes, even=even)
            target = _target(placed, dims, tp_size)
        except (LayoutError, UnsupportedError) as error:
            survey.degrees.append(Degree(tp_size, False, reason=str(error)))
            continue
        survey.degrees.append(_degree(tp_size, axes, bytes_by_rank(target), survey.bytes))
    return survey


def _target(placed: Placed, dims: Mapping[str, tuple[Dim, ...]], tp_size: int) -> Placed:
    """The layout at one degree; raises LayoutError where a cut would fall inside a byte."""
    tensors = placed.layout.tensors.values()
    target = place_native(cut_layout(tensors, dims, tp_size)).placed
    if any(DTYPE_BITS[tensor.dtype] % 8 for tensor in tensors):
        build_plan(placed, target)
    return target


def _degree(tp_size: int, axes: Mapping[Axis, str], held: list[int], total: int) -> Degree:
    return Degree(
        tp_size,
        True,
        equal=all(axis.is_equal(tp_size) for axis in axes),
        rank_bytes=held,
        sharded_fraction=sharded_fraction(held, total),
        uneven=[describe_uneven(found) for found in uneven(axes, tp_size)],
        held_whole=[describe_held_whole(axis, tp_size) for axis in held_whole(axes, tp_size)],
        padding=[describe_padding(found) for found in paddings(axes, tp_size)],
    )


def _survey(
    path: str,
    kind: str,
    family: str,
    tensors: Sequence[Logical],
    axes: Mapping[Axis, str],
    notes: Mapping[str, Note],
) -> Survey:
    dtypes: dict[str, int] = {}
    for tensor in tensors:
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + stored_bytes(tensor.shape, tensor.dtype)
    return Survey(
        "inspect",
        path=path,
        kind=kind,
        family=family,
        model_type="",
        tensors=len(tensors),
        bytes=sum(dtypes.values()),
        dtypes=dict(sorted(dtypes.items())),
        axes={axis.name: axis.describe() for axis in axes},
        equal_degrees=equal_degrees(axes),
        largest_degree=largest_degree(axes),
        needs_sum=patterns(notes, NEEDS_SUM),
        added_once=patterns(notes, ADDED_ONCE),
    )


def listing(what: str) -> Listing:
    """The families that have a table, or the engines: versions whose names are known, and how they were checked."""
    if what == "engines":
        from .exporting.registry import engines

        return Listing(
            "list", what,
            [
                Entry(name, [f"{version.name} ({version.checked})" for version in module.VERSIONS], module.SUMMARY)
                for name, module in engines().items()
            ],
        )  # fmt: skip
    return Listing("list", what, [Entry(name, sorted(module.MODEL_TYPES)) for name, module in families().items()])
