"""From an engine's directory back to a Hugging Face checkpoint."""

from __future__ import annotations

import os

from tpshard.accounting import bytes_by_rank
from tpshard.execute import Outcome
from tpshard.layout import whole_layout
from tpshard.manifest import SideFile
from tpshard.options import DEFAULTS, Options
from tpshard.output import Ending, Job, make
from tpshard.outputplace import check_separate
from tpshard.place import place_repacked, repacked_index
from tpshard.planning import build_plan
from tpshard.reports import Conversion
from tpshard.shards import given_path

from .reading import open_engine

_LARGEST = 5 << 30  # of a file, where the user names no size: what transformers has written for years


def merge_engine(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    engine: str | None = None,
    config: str | os.PathLike[str] | None = None,
    repack_bytes: int | None = None,
    options: Options = DEFAULTS,
) -> Conversion:
    """Join an engine's files to a checkpoint: the tensors are the source's, in files of their own.

    Replicas are compared and padding is checked to be zero. Which files the checkpoint had the engine's directory
    does not tell: they are packed anew, in parts of at most ``repack_bytes`` (5 GiB; 0: one file). ``engine`` and
    ``config`` are as in :func:`tpshard.exporting.reading.open_engine`.

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: as that function; replicas differ, or padding is not
            zero.
    """
    target = given_path(output, "the output")
    given = open_engine(source, engine, config=config)
    check_separate(given.root, target)
    headed = place_repacked(whole_layout(given.model.tensors), _LARGEST if repack_bytes is None else repack_bytes)
    plan = build_plan(given.placed, headed.placed)
    index = repacked_index(headed)
    small = {} if index is None else {index[0]: index[1]}
    report = Conversion(
        "merge", source=str(source), output=str(output), family=given.model.family, from_tp_size=given.tp_size,
        to_tp_size=1, tensors=len(given.model.tensors), dry_run=options.dry_run, layout=headed.placed.layout.digest,
        rank_bytes=bytes_by_rank(headed.placed), files=[file.name for file in headed.placed.files],
        left_out=list(given.left_out), warnings=list(given.warnings),
    )  # fmt: skip

    def ending(outcome: Outcome, sides: tuple[SideFile, ...]) -> Ending:
        given.check_unchanged()
        frames = {file.name: ((0, header),) for file, header in zip(headed.placed.files, headed.headers, strict=True)}
        return Ending(frames.items(), small)

    sides = {path: size for path, size in given.sides.items() if path not in small}
    sizes = {name: len(data) for name, data in small.items()}
    job = Job(plan, given.root, given.files, sides, sizes, options.algorithm, ending)
    return make(job, target, report, options)
