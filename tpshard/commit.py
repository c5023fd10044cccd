"""An output directory that appears whole or not at all.

Everything is written into ``NAME.tpshard-partial`` beside the output, on the same file system, and
becomes visible by one rename. A run that is killed leaves that directory, whose name no reader
takes for an output; the next run clears it, or goes on from its journal. A running one holds a lock on it.

Nothing is flushed to the device unless asked for (``fsync=True``): ``cp`` doesn't either, it would
cost more than the copy, and ``tpshard verify`` finds what a power cut took.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from .errors import StorageError, UsageError
from .openfiles import storage_error
from .outputplace import check_output, real_path
from .publish import previous_path, recover, swap
from .stagefolder import JOURNAL, OUTPUT, Note, StageFolder


class Staging:
    """The directory in which an output is made; a context manager.

    Entering refuses what :func:`check_output` refuses, takes the staging directory and makes :attr:`path` in it.
    :meth:`publish` makes everything in :attr:`path` visible as ``out`` at once; leaving without it removes
    the staging directory, unless :attr:`keep` was set, and leaves ``out`` as it was.

    Args:
        note: called with messages for the user.
        written: the files that the output will hold, as for :func:`check_output`.
        resume: what a run that is no more left in it stays, if it left a journal.
        keep_previous: what is replaced is kept beside ``out`` instead of deleted.

    Raises UsageError and StorageError.
    """

    def __init__(
        self, out: Path, *, overwrite: bool, needed_bytes: int, fsync: bool = False, note: Note | None = None,
        written: Collection[str] = (), resume: bool = False, keep_previous: bool = False,
    ) -> None:  # fmt: skip
        self.out = real_path(out)
        self._note = note or (lambda message: None)
        self._folder = StageFolder(out, self._note)
        self.path = self._folder.path / OUTPUT
        self.journal = self._folder.path / JOURNAL
        self.keep = False  # leaving without having published keeps what was done
        self.published = False  # also where an earlier run was killed right after it had published
        self._named = out
        self._overwrite = overwrite
        self._needed_bytes = needed_bytes
        self._written = written
        self._fsync = fsync
        self._resume = resume
        self._keep_previous = keep_previous

    def __enter__(self) -> Staging:
        try:
            if os.path.lexists(self._folder.path):
                self._take_over()
            else:
                self._check()
                self._folder.take()
            if not self.published:
                self._folder.sign()
                if not os.path.lexists(self.path):
                    os.mkdir(self.path)
        except OSError as problem:
            self._folder.release()
            raise storage_error(problem, self._folder.path, "making it") from problem
        except BaseException:
            self._folder.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.keep or self.published:
                self._folder.remove()
        finally:
            self._folder.release()

    def _check(self) -> None:
        check_output(
            self._named, overwrite=self._overwrite, needed_bytes=self._needed_bytes, written=self._written
        )
        kept = previous_path(self.out)
        if self._keep_previous and os.path.lexists(kept) and (os.path.islink(kept) or not os.path.isdir(kept)):
            raise UsageError(f"{kept}: is in the way of keeping the previous output, and isn't a directory. Move it.")

    def _take_over(self) -> None:
        """Finish what the run that left the directory was about, and clear it or keep what can be gone on from."""
        if not self._folder.take():
            self._check()
            return
        resumable = self._resume and self._has_journal()
        published = recover(self._folder.path, self.out, self._note)
        if resumable:
            self.published = published
            if not published:
                self._check()
            return
        if published:
            self._folder.clear()
            self._check()
            return
        pid = self._folder.owner()[0]
        more = " (--resume would have gone on from it)" if self._has_journal() else ""
        self._check()
        self._folder.clear()
        self._note(f"{self._folder.path}: cleared; process {pid or 'unknown'} left it unfinished{more}")

    def _has_journal(self) -> bool:
        return os.path.isfile(self.journal) and not os.path.islink(self.journal)

    # -- publishing --------------------------------------------------------------------------

    def publish(self) -> None:
        """Make everything visible as ``out`` by one rename. Call it once, after the manifest is written.

        Where an old ``out`` is replaced, it stays whole until then and is kept or deleted afterwards. Raises
        StorageError; ``out`` is then as it was.
        """
        try:
            if self._fsync:
                _flush(self.path)
            if self._overwrite and os.path.lexists(self.out):  # it may have become something else meanwhile
                check_output(self._named, overwrite=True, needed_bytes=0, written=self._written)
            swap(self._folder.path, self.path, self.out, replace=self._overwrite, keep=self._keep_previous)
            self.published = True
            if self._fsync:
                _flush_folder(self.out.parent)
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise StorageError(
                    f"{self._named}: something else was put there meanwhile. Name a new directory and run again."
                ) from problem
            raise storage_error(problem, self.out, f"renaming {self._folder.path.name} to it") from problem


def _flush(folder: Path) -> None:
    for at, _, names in os.walk(folder):
        for name in names:
            _flush_folder(Path(at) / name)
        _flush_folder(Path(at))


def _flush_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
