"""A split that becomes visible only if it passes verification; its card lies beside the shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .convert import split
from .errors import NotProvenError, StorageError, UsageError
from .gates import Settings, expanded
from .manifest import NAME
from .options import Options
from .reports import Conversion, Verification
from .shards import read_manifest
from .stagefolder import remove_tree
from .verification import NUMERIC, Run, verify

FAILED_SUFFIX = ".tpshard-failed"


def gated_split(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tp_size: int,
    levels: Sequence[str],
    *,
    options: Options,
    settings: Settings,
    run: Run,
    keep_failed: bool = True,
    card: bool = True,
    **how: Any,
) -> Conversion:
    """Split as :func:`tpshard.split` does (``how`` are its other arguments), and publish only what passes ``levels``.

    What fails is moved to ``OUTPUT.tpshard-failed``, where it replaces what failed before, or removed without
    ``keep_failed``. With ``card`` the verification card is written into the output.

    Raises:
        NotProvenError: the output did not pass; nothing was published. It carries the report.
        UsageError, UnsupportedError, DamagedError, StorageError: as :func:`tpshard.split`.
    """
    wanted = expanded(levels)
    if options.dry_run:
        raise UsageError("--verify checks what is written, and --dry-run writes nothing: leave one of them away")
    if any(level in NUMERIC for level in wanted):
        from .numerics import require

        require()  # said before anything is written
    aside = Path(os.path.realpath(output) + FAILED_SUFFIX)
    if keep_failed and os.path.lexists(aside) and (aside.is_symlink() or not (aside / NAME).is_file()):
        raise StorageError(
            f"{aside} is in the way of keeping what fails, and holds no {NAME}: tpshard did not put it there. Move it "
            "elsewhere and run again."
        )
    made: list[Verification] = []
    bare = replace(options, gate=None)

    def gate(staged: Path) -> None:
        report = verify(staged, against=source, levels=wanted, options=bare, settings=settings, run=run)
        report.shards = str(output)
        made.append(report)
        if not report.passed:
            _refuse(report, staged, aside if keep_failed else None)
        if card:
            from .outputs.card import write_card

            write_card(staged, report, read_manifest(staged))

    report = split(source, output, tp_size, options=replace(options, gate=gate), **how)
    report.verification = made[0]
    return report


def _refuse(report: Verification, staged: Path, aside: Path | None) -> None:
    where = "nothing was published"
    if aside is not None:
        try:
            if os.path.lexists(aside):
                remove_tree(aside)
            os.rename(staged, aside)
        except OSError as error:
            raise StorageError(f"{aside}: moving the failed output there failed: {error.strerror or error}") from None
        where += f", and what failed is kept in {aside}"
    failed = [verdict.level for verdict in report.verdicts if verdict.verdict != "passed"]
    message = f"{report.shards}: the verification did not pass ({', '.join(failed)}), {where}; the report tells why"
    raise NotProvenError(message, report)
