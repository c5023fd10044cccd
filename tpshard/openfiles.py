"""Positional reads and writes over many files with few descriptors.

64 ranks and a thousand source files must work under the usual limit of 256 or 1,024 open files, so
descriptors are opened when needed and the one that was used longest ago is closed first.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from .errors import DamagedError, StorageError

_RESERVED = 16  # descriptors left to the rest of the process: the terminal, a lock file, an import
_MOST = 4096
_RESERVE_FROM = 1 << 20  # smaller files aren't worth the import of ctypes


def storage_error(problem: OSError, path: Path, doing: str) -> StorageError:
    """Turn an ``OSError`` into a message that names the file, the cause and the remedy."""
    cause = problem.strerror or str(problem)
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            room = os.statvfs(path.parent)
            free = f"{room.f_bavail * room.f_frsize:,} bytes are free there"
        except OSError:
            free = "the free space is unknown"
        return StorageError(f"{path}: {doing} failed: {cause}; {free}. Free some space or name another directory.")
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"{path}: {doing} failed: {cause}. Check the permissions of the file and its directory.")
    if problem.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError(f"{path}: {doing} failed: {cause}. Raise the limit of open files (ulimit -n).")
    return StorageError(f"{path}: {doing} failed: {cause} (errno {problem.errno}). Check the device and run again.")


def open_file_budget() -> int:
    """How many more files this process may hold open, at least 4."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return 128
    if soft < 0:
        return _MOST
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = 32
    return max(4, min(soft - used - _RESERVED, _MOST))


def _reserve(fd: int, nbytes: int) -> bool:
    """Allocate a file's blocks in one step (Linux, fallocate(2)); False where system or file system cannot.

    Writes then take some 12 % less processor time on ext4. ``os.posix_fallocate`` won't do: where the
    file system cannot, the C library writes into every block instead.
    """
    import ctypes

    if ctypes.sizeof(ctypes.c_long) < 8:
        return False  # the system call's offsets would be 32 bits wide
    try:
        allocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return False
    while allocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return False
    return True


class OpenFiles:
    """A set of files, opened when first used; safe to share between threads.

    ``writable`` files are opened for reading and writing, and must exist or have been made by
    :meth:`create`. Offsets and lengths are bytes.
    """

    def __init__(self, paths: Sequence[Path], writable: Sequence[bool], budget: int | None = None) -> None:
        self.paths = paths
        self._writable = writable
        self._budget = open_file_budget() if budget is None else budget
        self._all_fit = len(paths) <= self._budget
        self._fds: list[int] = [-1] * len(paths)
        self._users = [0] * len(paths)
        self._order: OrderedDict[int, None] = OrderedDict()  # open files, the one used longest ago first
        self._lock = threading.Lock()

    def create(self, file: int, nbytes: int) -> None:
        """Make ``file`` with ``nbytes`` bytes of zeros; it must not exist. The mode follows the umask.

        Space is reserved where the file system can, so that a full disk is found before anything is moved.
        """
        path = self.paths[file]
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as problem:
            raise storage_error(problem, path, "creating it") from problem
        try:
            if nbytes < _RESERVE_FROM or not _reserve(fd, nbytes):
                os.ftruncate(fd, nbytes)
        except OSError as problem:
            os.close(fd)
            raise storage_error(problem, path, f"making it {nbytes:,} bytes long") from problem
        with self._lock:
            self._make_room()
            self._fds[file] = fd
            self._order[file] = None

    def _make_room(self) -> None:
        if self._all_fit:
            return
        while len(self._order) >= self._budget:
            idle = next((file for file in self._order if not self._users[file]), None)
            if idle is None:
                return  # every open file is in use by some thread: there are few threads, so few of these
            del self._order[idle]
            fd, self._fds[idle] = self._fds[idle], -1
            self._close(fd, idle)

    def _close(self, fd: int, file: int) -> None:
        try:
            os.close(fd)
        except OSError as problem:  # network file systems report a failed write here
            raise storage_error(problem, self.paths[file], "closing it") from problem

    def _take(self, file: int) -> int:
        if self._all_fit:
            fd = self._fds[file]
            if fd >= 0:
                return fd
        with self._lock:
            fd = self._fds[file]
            if fd < 0:
                self._make_room()
                flags = os.O_RDWR if self._writable[file] else os.O_RDONLY
                try:
                    fd = os.open(self.paths[file], flags | os.O_CLOEXEC)
                except OSError as problem:
                    raise storage_error(problem, self.paths[file], "opening it") from problem
                self._fds[file] = fd
                self._order[file] = None
            elif not self._all_fit:
                self._order.move_to_end(file)
            self._users[file] += 1
        return fd

    def _give(self, file: int) -> None:
        if not self._all_fit:
            with self._lock:
                self._users[file] -= 1

    def read(self, file: int, into: memoryview, offset: int) -> None:
        """Fill ``into`` from ``offset``. Raises DamagedError where the file ends early, else StorageError."""
        fd = self._take(file)
        try:
            done, size = 0, len(into)
            while done < size:
                try:
                    count = os.preadv(fd, [into[done:] if done else into], offset + done)
                except InterruptedError:
                    continue
                except OSError as problem:
                    raise storage_error(problem, self.paths[file], f"reading at byte {offset + done:,}") from problem
                if count <= 0:
                    raise DamagedError(
                        f"{self.paths[file]}: the file has {os.fstat(fd).st_size:,} bytes by now, and bytes {offset:,} "
                        f"to {offset + size:,} of it were there when its header was read: it shrank or is being "
                        "rewritten. Fetch it again, and let nothing write to it meanwhile."
                    )
                done += count
        finally:
            self._give(file)

    def write(self, file: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``. Raises StorageError."""
        fd = self._take(file)
        try:
            done, size = 0, len(data)
            while done < size:
                try:
                    count = os.pwrite(fd, data[done:] if done else data, offset + done)
                except InterruptedError:
                    continue
                except OSError as problem:
                    doing = f"writing {size - done:,} bytes at byte {offset + done:,}"
                    raise storage_error(problem, self.paths[file], doing) from problem
                if count <= 0:
                    raise StorageError(f"{self.paths[file]}: the device takes no more bytes at {offset + done:,}.")
                done += count
        finally:
            self._give(file)

    def close(self) -> None:
        """Close every file. Raises StorageError where a file system reports a lost write only now."""
        failed: StorageError | None = None
        for file in list(self._order):
            fd, self._fds[file] = self._fds[file], -1
            try:
                self._close(fd, file)
            except StorageError as problem:
                failed = failed or problem
        self._order.clear()
        if failed is not None:
            raise failed
