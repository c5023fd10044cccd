"""Opens a weights file, reads what it holds, and notices when it is no longer the same file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .errors import DamagedError, UnsupportedError
from .header import Read, WeightsFile, read_header
from .listing import kind_of, shown, storage_error


class Stamp(NamedTuple):
    """What changes when a file does: size in bytes, time of change in ns, inode."""

    size: int
    mtime_ns: int
    inode: int


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp in an ``os.stat`` result."""
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def open_weights(root: Path, name: str, format: str, within: str | None = None) -> tuple[WeightsFile, Stamp]:
    """Read the header of ``root/name``; ``format`` is "safetensors" or "torch". The file is closed again.

    ``within`` as :func:`tpshard.torchfile.read_torch` has it.

    Raises:
        DamagedError: it is no regular file, or not what its format asks for.
        StorageError: it cannot be opened or read.
    """
    path = root / name
    descriptor, status = _opened(path)
    try:
        read = _reader(descriptor, path)
        if format == "safetensors":
            weights = read_header(read, status.st_size, name)
        else:
            from .torchfile import read_torch

            weights = read_torch(read, status.st_size, name, within)
        return weights, stamp_of(status)
    except (DamagedError, UnsupportedError) as error:
        told = str(error)  # they begin with the name, as they know of no directory
        raise type(error)(f"{shown(path)}{told[len(name) :] if told.startswith(name) else f': {told}'}") from None
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[tuple[Read, Stamp]]:
    """A reader of an open file and its stamp; raises as :func:`open_weights`."""
    descriptor, status = _opened(path)
    try:
        yield _reader(descriptor, path), stamp_of(status)
    finally:
        os.close(descriptor)


def read_small(path: Path, limit: int) -> bytes:
    """All of a file of at most ``limit`` bytes.

    Raises:
        DamagedError: it is longer, or no regular file (a FIFO or device is not waited for).
        StorageError: it cannot be opened or read.
    """
    descriptor, status = _opened(path)
    try:
        if status.st_size > limit:
            raise DamagedError(
                f"{shown(path)} has {status.st_size:,} bytes; such a file has at most {limit:,}. Download or copy the "
                "file again."
            )
        return _reader(descriptor, path)(0, status.st_size)
    finally:
        os.close(descriptor)


def require_regular(path: Path) -> None:
    """Raise DamagedError if there is something of this name, also behind a link, that is no regular file."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # whoever reads it says why it cannot be
    if not stat.S_ISREG(mode):
        raise DamagedError(f"{shown(path)} is {kind_of(mode)}, not a regular file. Download or copy the file again.")


def _opened(path: Path) -> tuple[int, os.stat_result]:
    """A descriptor of a regular file, and its state."""
    require_regular(path)  # opening a device may have effects
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise storage_error(error, path, "opening it") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise DamagedError(f"{shown(path)} is not a regular file. Download or copy the file again.")
    return descriptor, status


def same_start(path: Path, start: bytes, size: int) -> Stamp | None:
    """The stamp of a file of exactly ``size`` bytes that begins with ``start``; None for any other.

    Raises:
        StorageError: it cannot be opened or read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise storage_error(error, path, "opening it") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return None
        return stamp_of(status) if _reader(descriptor, path)(0, len(start)) == start else None
    finally:
        os.close(descriptor)


def require_unchanged(root: Path, names: Iterable[str], stamps: Iterable[Stamp]) -> None:
    """Raise DamagedError, naming the file, if one of ``root/names`` is not as its stamp says by now."""
    for name, stamp in zip(names, stamps, strict=True):
        path = root / name
        try:
            now = stamp_of(os.stat(path))
        except FileNotFoundError:
            raise DamagedError(f"{shown(path)} has gone since it was opened. Restore it and start again.") from None
        except OSError as error:
            raise storage_error(error, path, "looking at it again") from None
        if now != stamp:
            raise DamagedError(
                f"{shown(path)} has changed since it was opened ({stamp.size:,} bytes then, {now.size:,} now). Wait "
                "until nothing writes to it, then start again."
            )


def _reader(descriptor: int, path: Path) -> Callable[[int, int], bytes]:
    """``read(offset, nbytes)`` over an open file; short only at the end of the file."""

    def read(offset: int, nbytes: int) -> bytes:
        try:
            found = os.pread(descriptor, nbytes, offset)
            while len(found) < nbytes:
                more = os.pread(descriptor, nbytes - len(found), offset + len(found))
                if not more:
                    break
                found += more
        except OSError as error:
            raise storage_error(error, path, f"reading {nbytes:,} bytes at byte {offset:,}") from None
        return found

    return read
