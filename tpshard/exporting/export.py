"""Writes a model as an engine's files: one plan from where its tensors lie to where the engine looks for them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tpshard.accounting import bytes_by_rank, logical_bytes
from tpshard.errors import UsageError
from tpshard.execute import Outcome
from tpshard.manifest import SideFile
from tpshard.options import DEFAULTS, Options
from tpshard.output import Ending, Job, make
from tpshard.outputplace import check_separate
from tpshard.planning import build_plan
from tpshard.reports import Export, sharded_fraction
from tpshard.shards import given_path

from .arrange import Arranged, arrange
from .chunked import arrange_chunks
from .files import place_engine, without
from .given import Given
from .options import engine_and_version, grid_of
from .sources import open_any

_NOT_OF_ENGINES = frozenset({"tpshard.json", "tpshard-verification.json", "model.safetensors.index.json"})


def export(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    engine: str,
    tp_size: int,
    *,
    pp_size: int = 1,
    ep_size: int = 1,
    stages: str | None = None,
    source_engine: str | None = None,
    source_config: str | os.PathLike[str] | None = None,
    max_file_bytes: int | None = None,
    options: Options = DEFAULTS,
) -> Export:
    """Write a checkpoint, shards, or another engine's directory as the files of an engine.

    ``engine`` is a name of ``tpshard list engines``, with ``@version`` for names that are not the newest. ``stages``
    says how many layers each pipeline stage takes (``16,15,15,15``) where the engine's own rule is not wanted.
    ``source_engine`` names the engine whose directory ``source`` is, where its files' names do not tell;
    ``source_config`` is a directory with the model's config.json, where that one has none.
    ``max_file_bytes`` is the largest size of a file (0: one file a rank; None: what the engine writes).

    Raises:
        UsageError: no such engine, degrees that make no sense, or output and source overlap.
        UnsupportedError: a model or degree that the engine cannot load.
        DamagedError: the source is damaged, incomplete, or contradicts itself.
        StorageError: no space, no permission, a device error.
    """
    target = given_path(output, "the output")
    module, version = engine_and_version(engine)
    given = open_any(source, source_engine, config=source_config)
    check_separate(given.root, target)
    name: str = module.ENGINE
    table = module.table(given.model, version)
    grid = grid_of(given.model, table, name, tp_size, pp_size, ep_size, stages)
    arranged = (arrange_chunks if table.chunked else arrange)(given.model, table, grid, name)
    files = place_engine(arranged, table, max_file_bytes)
    plan = build_plan(without(given.placed, arranged.dropped), files.placed)
    small = {**table.sides(given.model, grid), **files.small}
    sides = {
        path: size for path, size in given.sides.items()
        if path not in _NOT_OF_ENGINES and path not in table.left_out and path not in small
    }  # fmt: skip
    report = _report(given, arranged, name, version, str(source), str(output), options)
    report.files = [file.name for file in files.placed.files]
    report.rank_bytes = bytes_by_rank(files.placed)
    report.sharded_fraction = sharded_fraction(report.rank_bytes, logical_bytes(arranged.layout))
    for warning in given.warnings:
        report.warnings.append(warning)
        options.note(warning)

    def ending(outcome: Outcome, carried: tuple[SideFile, ...]) -> Ending:
        given.check_unchanged()
        return Ending(files.frames.items(), small)

    numbers = {extent: number for number, extent in enumerate(_reads(given))} if given.expected else {}
    expected: Mapping[int, str] = (
        {at: given.expected[numbers[extent]] for at, extent in enumerate(plan.reads)} if numbers else {}
    )
    job = Job(
        plan, given.root, given.files, sides, {path: len(data) for path, data in small.items()},
        given.algorithm or options.algorithm,
        ending, expected,
    )  # fmt: skip
    make(job, target, report, options)
    return report


def _reads(given: Given) -> list[object]:
    return [extent for row in given.placed.extents for extent in row if extent is not None]


def _report(
    given: Given, arranged: Arranged, engine: str, version: str, source: str, output: str, options: Options
) -> Export:
    grid = arranged.grid
    reasons: dict[str, list[str]] = {}
    for name, why in arranged.dropped.items():
        reasons.setdefault(why, []).append(name)
    left_out = [
        f"{names[0]}{f' and {len(names) - 1:,} more' if len(names) > 1 else ''} ({why})"
        for why, names in reasons.items()
    ]
    if len(arranged.layout.tensors) == 0:
        raise UsageError(f"nothing of {source} would be written")
    return Export(
        "export", source=source, output=output, family=given.model.family, from_tp_size=given.tp_size,
        to_tp_size=grid.tp_size, tensors=len(arranged.layout.tensors), dry_run=options.dry_run,
        layout=arranged.layout.digest, left_out=[*given.left_out, *left_out], engine=engine, version=version,
        pp_size=grid.pp_size, ep_size=grid.ep_size,
        stages=[list(bounds) for bounds in grid.stages],
    )  # fmt: skip
