"""From an engine's directory to shards of the native layout, by way of the checkpoint that both are cut from.

Shards remember the digest of every tensor of their source, which an engine's files hold nowhere in one piece; so the
checkpoint is written beside the output first, and removed when the shards are there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from tpshard.convert import split
from tpshard.listing import storage_error
from tpshard.options import DEFAULTS, Options
from tpshard.reports import Conversion
from tpshard.shards import given_path

from .merging import merge_engine


def reshard_engine(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tp_size: int,
    *,
    engine: str | None = None,
    config: str | os.PathLike[str] | None = None,
    even: bool = False,
    max_file_bytes: int = 0,
    options: Options = DEFAULTS,
) -> Conversion:
    """Cut what an engine's directory holds into native shards; room for the checkpoint is needed beside the output.

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: as :func:`tpshard.exporting.merging.merge_engine` and
            :func:`tpshard.convert.split`.
    """
    target = given_path(output, "the output")
    if options.dry_run:
        return merge_engine(source, target, engine=engine, config=config, options=options)
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        between = Path(tempfile.mkdtemp(prefix=f".{target.name}.tpshard-between-", dir=parent))
    except OSError as error:
        raise storage_error(error, parent, "making a directory in it") from None
    try:
        first = replace(options, overwrite=False)
        merge_engine(source, between / "checkpoint", engine=engine, config=config, options=first)
        report = split(
            between / "checkpoint", target, tp_size, even=even, max_file_bytes=max_file_bytes, options=options
        )
    finally:
        shutil.rmtree(between, ignore_errors=True)
    report.verb, report.source = "reshard", str(source)
    return report
