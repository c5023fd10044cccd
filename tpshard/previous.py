"""Brings back the output that ``--keep-previous`` kept when it was replaced."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import StorageError, UsageError
from .openfiles import storage_error
from .outputplace import real_path
from .publish import exchange, previous_path, recover, swap
from .reports import Rollback
from .shards import given_path
from .stagefolder import JOURNAL, StageFolder


def rollback(output: str | os.PathLike[str]) -> Rollback:
    """Exchange ``output`` with what it held before, in one step where the system can; again, and it is undone.

    What is exchanged is whole directories, of whose content nothing is changed.

    Raises:
        UsageError: nothing is kept beside ``output``.
        StorageError: a run is making ``output``, or what the operating system reports; it is then as it was.
    """
    named = given_path(output, "the output")
    notes: list[str] = []
    out = real_path(named)
    previous = previous_path(out)
    folder = StageFolder(named, notes.append)
    if not os.path.lexists(previous) and not os.path.lexists(folder.path):
        raise _nothing(named, previous)
    try:
        folder.take()
        idle = False  # an unfinished run's work is left to be gone on with
        try:
            idle = recover(folder.path, out, notes.append) or not os.path.lexists(folder.path / JOURNAL)
            if os.path.islink(previous) or not os.path.isdir(previous):
                raise _nothing(named, previous)
            if os.path.lexists(out) and (os.path.islink(out) or not os.path.isdir(out)):
                raise StorageError(f"{named}: is no directory. Move it away and run again.")
            kept = os.path.isdir(out)
            if not (kept and exchange(previous, out)):
                folder.sign()
                swap(folder.path, previous, out, replace=True, keep=True)
        finally:
            if idle:
                folder.remove()
            folder.release()
    except OSError as problem:
        raise storage_error(problem, out, f"exchanging it with {previous.name}") from problem
    return Rollback("rollback", str(output), str(previous) if kept else None, notes)


def _nothing(named: Path, previous: Path) -> UsageError:
    return UsageError(
        f"{named}: there is nothing to go back to: no {previous.name} lies beside it. With --keep-previous, "
        "--overwrite keeps what it replaces."
    )
