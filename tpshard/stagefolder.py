"""``NAME.tpshard-partial``: the directory beside an output in which it is made, and the lock on it.

It holds a mark that names the process and host at work, the journal, what is being made in ``output``, and for
the moment of publishing what is being replaced. The mark is written first and goes last: whatever stops a run,
the next one knows the directory for what it is. No reader takes it, or what lies in it, for an output.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from .errors import StorageError
from .listing import PARTIAL_SUFFIX
from .outputplace import partial_path

MARK = PARTIAL_SUFFIX  # the file that names the process and host at work
OUTPUT = "output"  # the directory that becomes the output
JOURNAL = "journal"
_MANIFEST = "tpshard.json"

Note = Callable[[str], None]


class StageFolder:
    """The directory beside ``out``; one run at a time holds it. ``note`` is called with messages for the user."""

    def __init__(self, out: Path, note: Note) -> None:
        self.path = partial_path(out)
        self._named = out
        self._note = note
        self._lock = -1

    def take(self) -> bool:
        """Make the directory, or take over what a run left behind that is no more; return whether something was there.

        Raises:
            StorageError: another run holds it, or something that tpshard did not make is in the way.
            OSError: what the operating system reports.
        """
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
            self.release()  # the run that held it ended and took it away between the two looks
        if found:
            names = os.listdir(self.path)
            if names and MARK not in names:
                raise StorageError(
                    f"{self.path}: is in the way, and doesn't say that tpshard made it. Move it elsewhere and run "
                    "again."
                )
            found = bool(names)
        return found

    def sign(self) -> None:
        """Write who is at work into the mark."""
        signature = f"{os.getpid()} {socket.gethostname()}\n".encode()
        mark = os.open(self.path / MARK, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            os.write(mark, signature)
        finally:
            os.close(mark)

    def owner(self) -> tuple[int, str]:
        """Process number and host of the run that signed it; 0 and '' where it doesn't say."""
        try:
            words = (self.path / MARK).read_text(encoding="utf-8").split()
            return int(words[0]), words[1]
        except (OSError, ValueError, IndexError):
            return 0, ""

    def clear(self) -> None:
        """Empty it but for the mark: manifests first, so that what a kill leaves is no output; small files last."""
        names = [name for name in os.listdir(self.path) if name != MARK]
        folders = [name for name in names if _is_folder(self.path / name)]
        for name in folders:
            os.chmod(self.path / name, 0o700)
            (self.path / name / _MANIFEST).unlink(missing_ok=True)
        for name in [*folders, *sorted(set(names) - set(folders))]:
            remove_tree(self.path / name)

    def remove(self) -> None:
        """Delete it; a note where it cannot be."""
        try:
            os.chmod(self.path, 0o700)
            self.clear()
            (self.path / MARK).unlink(missing_ok=True)
            os.rmdir(self.path)
        except FileNotFoundError:
            return
        except OSError as problem:
            self._note(f"{self.path}: could not be removed ({problem.strerror or problem}); delete it by hand")

    def release(self) -> None:
        """Let others take it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- the lock ----------------------------------------------------------------------------

    def _take_lock(self, found: bool) -> None:
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, host = self.owner()
            raise StorageError(
                f"{self._named}: another run is making it in {self.path} (process {pid or 'unknown'}"
                f"{' on ' + host if host and host != socket.gethostname() else ''}). "
                "Wait for it to end, or name another directory."
            ) from None
        except (ImportError, OSError) as problem:
            self._note(f"{self.path}: cannot be locked ({problem}); going by process number instead")
            if found:
                self._check_owner_is_gone()

    def _check_owner_is_gone(self) -> None:
        pid, host = self.owner()
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


def remove_tree(path: Path) -> None:
    """Delete a file or a directory with all that it holds, whatever the modes below it; links are not followed."""
    if _is_folder(path):
        _open_up(path)
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _open_up(folder: Path) -> None:
    """A directory without write permission could not be emptied, and one without read permission not be walked."""
    os.chmod(folder, 0o700)
    for at, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(at, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
