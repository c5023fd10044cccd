"""An output directory that appears whole or not at all.

Everything is written into ``NAME.tpshard-partial`` beside the output, on the same file system, and
becomes visible by one rename. A run that is killed leaves that directory, whose name no reader
takes for an output; the next run clears it. A running one holds a lock on it.

Nothing is flushed to the device unless asked for (``fsync=True``): ``cp`` doesn't either, it would
cost more than the copy, and ``tpshard verify`` finds what a power cut took.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

from .errors import StorageError
from .openfiles import storage_error
from .outputplace import check_output, partial_path, real_path

_OLD_SUFFIX = ".tpshard-old"
_MARK = ".tpshard-partial"  # the file in a partial directory that names the process and host at work
_MANIFEST = "tpshard.json"

Note = Callable[[str], None]


class Staging:
    """The directory in which an output is made; a context manager.

    Entering refuses what :func:`check_output` refuses, makes :attr:`path` and locks it.
    :meth:`publish` makes everything in it visible as ``out`` at once; leaving without it removes
    the directory and leaves ``out`` as it was. ``note`` is called with messages for the user; ``written``
    are the files that the output will hold, as for :func:`check_output`.

    Raises UsageError and StorageError.
    """

    def __init__(
        self, out: Path, *, overwrite: bool, needed_bytes: int, fsync: bool = False, note: Note | None = None,
        written: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.out = real_path(out)
        self.path = partial_path(out)
        self._named = out
        self._overwrite = overwrite
        self._needed_bytes = needed_bytes
        self._written = written
        self._fsync = fsync
        self._note = note or (lambda message: None)
        self._lock = -1
        self._published = False

    def __enter__(self) -> Staging:
        check_output(
            self._named, overwrite=self._overwrite, needed_bytes=self._needed_bytes, written=self._written
        )
        try:
            self._take()
        except OSError as problem:
            self._release()
            raise storage_error(problem, self.path, "making it") from problem
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._published:
                _remove(self.path, self._note)
        finally:
            self._release()

    # -- taking the directory ----------------------------------------------------------------

    def _take(self) -> None:
        while True:
            try:
                os.mkdir(self.path)
                found = False
            except FileExistsError:
                found = True
            if os.path.islink(self.path) or not os.path.isdir(self.path):
                raise StorageError(f"{self.path}: is in the way, and isn't a directory. Remove it and run again.")
            self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self._take_lock(found)
            try:
                still_there = os.path.samestat(os.fstat(self._lock), os.stat(self.path))
            except FileNotFoundError:
                still_there = False
            if still_there:
                break
            self._release()  # the run that held it ended and took it away between the two looks
        if found:
            self._clear()
        with (self.path / _MARK).open("x", encoding="utf-8") as mark:
            mark.write(f"{os.getpid()} {socket.gethostname()}\n")

    def _take_lock(self, found: bool) -> None:
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, host = self._owner()
            raise StorageError(
                f"{self._named}: another run is making it in {self.path} (process {pid or 'unknown'}"
                f"{' on ' + host if host and host != socket.gethostname() else ''}). "
                "Wait for it to end, or name another directory."
            ) from None
        except (ImportError, OSError) as problem:
            self._note(f"{self.path}: cannot be locked ({problem}); going by process number instead")
            if found:
                self._check_owner_is_gone()

    def _owner(self) -> tuple[int, str]:
        """Return process number and host of the run that made the directory; 0 and '' where it doesn't say."""
        try:
            words = (self.path / _MARK).read_text(encoding="utf-8").split()
            return int(words[0]), words[1]
        except (OSError, ValueError, IndexError):
            return 0, ""

    def _check_owner_is_gone(self) -> None:
        pid, host = self._owner()
        if host and host != socket.gethostname():
            raise StorageError(
                f"{self.path}: was begun by process {pid} on {host}, and this file system has no locks that would "
                "tell whether it still runs. Remove the directory if it doesn't."
            )
        if pid:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            except PermissionError:
                pass
            raise StorageError(
                f"{self.path}: process {pid} is making it, or another process has that number by now. "
                "Wait for it to end, or remove the directory."
            )

    def _clear(self) -> None:
        """Empty a directory that a run left behind which is no more."""
        names = os.listdir(self.path)
        if names and _MARK not in names:
            raise StorageError(
                f"{self.path}: is in the way, and doesn't say that tpshard made it. Move it elsewhere and run again."
            )
        pid = self._owner()[0]
        # the mark goes last: whatever stops this, the next run still knows the directory for what it is
        for name in sorted(names, key=lambda name: name == _MARK):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                _open_up(path)
                shutil.rmtree(path)
            else:
                path.unlink()
        if names:
            self._note(f"{self.path}: cleared; process {pid or 'unknown'} left it unfinished")

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- publishing --------------------------------------------------------------------------

    def publish(self) -> None:
        """Make everything visible as ``out`` by one rename. Call it once, after the manifest is written.

        Where an old ``out`` is replaced, it stays whole until then and is deleted afterwards. Raises
        StorageError; ``out`` is then as it was.
        """
        try:
            if self._fsync:
                _flush(self.path)
            os.unlink(self.path / _MARK)
            replaced = self._swap()
            self._published = True
            if self._fsync:
                _flush_folder(self.out.parent)
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise StorageError(
                    f"{self._named}: something else was put there meanwhile. Name a new directory and run again."
                ) from problem
            raise storage_error(problem, self.out, f"renaming {self.path.name} to it") from problem
        if replaced is not None:
            _remove(replaced, self._note)

    def _swap(self) -> Path | None:
        """Rename the partial directory to ``out``; return where an old ``out`` lies now."""
        if not self._overwrite or not self.out.exists() or next(os.scandir(self.out), None) is None:
            os.rename(self.path, self.out)
            return None
        # it may have become something else meanwhile
        check_output(self._named, overwrite=True, needed_bytes=0, written=self._written)
        if _exchange(self.path, self.out):
            return self.path
        aside = self.out.with_name(self.out.name + _OLD_SUFFIX)
        if os.path.lexists(aside):
            raise StorageError(f"{aside}: is in the way of replacing {self.out}. Move it elsewhere and run again.")
        os.rename(self.out, aside)
        try:
            os.rename(self.path, self.out)
        except BaseException:
            os.rename(aside, self.out)
            raise
        return aside


def _exchange(one: Path, two: Path) -> bool:
    """Exchange two directories in one step (Linux, renameat2(2)); False where system or file system cannot."""
    import ctypes

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_working_directory, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(at_working_directory, os.fsencode(one), at_working_directory, os.fsencode(two), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(one))


def _remove(folder: Path, note: Note) -> None:
    """Delete a directory of ours, the manifest first, so that what a kill leaves of it never looks whole."""
    try:
        os.chmod(folder, 0o700)
        (folder / _MARK).touch()
        (folder / _MANIFEST).unlink(missing_ok=True)
        _open_up(folder)
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as problem:
        note(f"{folder}: could not be removed ({problem.strerror or problem}); delete it by hand")


def _open_up(folder: Path) -> None:
    """A directory without write permission could not be emptied, and one without read permission not be walked."""
    os.chmod(folder, 0o700)
    for at, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(at, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)


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
