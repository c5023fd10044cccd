"""Opens a weights file, reads what it holds, and notices when it is no longer the same file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from .errors import DamagedError
from .header import WeightsFile, read_header
from .listing import shown, storage_error


class Stamp(NamedTuple):
    """What changes when a file does: size in bytes, time of change in ns, inode."""

    size: int
    mtime_ns: int
    inode: int


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp in an ``os.stat`` result."""
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def open_weights(root: Path, name: str, format: str) -> tuple[WeightsFile, Stamp]:
    """Read the header of ``root/name``; ``format`` is "safetensors" or "torch". The file is closed again.

    Raises:
        DamagedError: it is no regular file, or not what its format asks for.
        StorageError: it cannot be opened or read.
    """
    path = root / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise storage_error(error, path, "opening it") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{shown(path)} is not a regular file. Download or copy the file again.")
        read = _reader(descriptor, path)
        if format == "safetensors":
            weights = read_header(read, status.st_size, name)
        else:
            from .torchfile import read_torch

            weights = read_torch(read, status.st_size, name)
        return weights, stamp_of(status)
    finally:
        os.close(descriptor)


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
            raise storage_error(error, path, f"reading {nbytes:,} bytes at {offset:,}") from None
        return found

    return read
