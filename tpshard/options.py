"""How an operation is run: what may be replaced, how much memory and how many threads, who is told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from .execute import Outcome
    from .observing import Observer
    from .planning import Plan
    from .reports import Conversion

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]

_MOST_THREADS = 256
_LEAST_MEMORY = 1 << 20
_LARGEST_TILE = 1 << 23


@dataclass(frozen=True)
class Options:
    """How an operation is run; the same for split, reshard, merge and verify.

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
        allow_changed: reshard and merge carry side files that were changed since the split, as they are now.
        gate: given the finished directory before it becomes visible; what it raises keeps it from that.
        resume: go on from what an unfinished run has left, and leave what is done where this one fails.
        keep_previous: what is replaced is kept beside the output, for :func:`tpshard.rollback`.
        observer: told of what is planned, moved and made.
    """

    overwrite: bool = False
    dry_run: bool = False
    threads: int | None = None
    max_memory: int | None = None
    algorithm: str = "xxh3_128"
    fsync: bool = False
    allow_changed: bool = False
    note: Callable[[str], None] = field(default=lambda message: None)
    progress: Progress | None = None
    gate: Callable[[Path], None] | None = None
    resume: bool = False
    keep_previous: bool = False
    observer: Observer | None = None

    def running(self, total: int) -> AbstractContextManager[Callable[[int], None] | None]:
        """A context manager around the function that is to be told of ``total`` bytes as they are done."""
        shown = nullcontext() if self.progress is None else self.progress(total)
        return shown if self.observer is None else self.observer.moving(total, shown)

    def planned(self, report: Conversion) -> None:
        """Tell the observer what is about to be done."""
        if self.observer is not None:
            self.observer.planned(report)

    def made(self, plan: Plan, outcome: Outcome) -> None:
        """Tell the observer what has become visible."""
        if self.observer is not None:
            self.observer.made(plan, outcome)


DEFAULTS = Options()


def move_settings(threads: int | None, max_memory: int | None) -> tuple[int | None, int | None]:
    """Threads and tile size in bytes that keep the buffers within ``max_memory`` bytes.

    Raises:
        UsageError: so little memory that nothing can be moved, or no thread.
    """
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise UsageError(f"{threads} threads make no sense; choose 1 to {_MOST_THREADS}")
    if max_memory is None:
        return threads, None
    if max_memory < _LEAST_MEMORY:
        raise UsageError(f"--max-memory of {max_memory} bytes is too little to work in; give at least 1 MiB")
    many = threads or 2
    # A thread holds two tiles when it moves and four when it compares.
    return many, min(max(max_memory // (4 * many), 1 << 10), _LARGEST_TILE)
