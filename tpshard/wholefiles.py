"""Writes small files and the frames of large ones: every byte of them, or an error that names the file."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import StorageError
from .header import Frame
from .openfiles import storage_error


def write_new(path: Path, data: bytes) -> None:
    """Make a file that doesn't exist yet, with these bytes.

    Raises:
        StorageError: it exists, or what the operating system reports.
    """
    _write(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, ((0, data),), "writing it")


def write_frame(path: Path, frame: Frame) -> None:
    """Write the bytes of an existing file that are not tensor data, each piece at its offset.

    Raises:
        StorageError: there is no such file, or what the operating system reports.
    """
    _write(path, os.O_WRONLY, frame, "writing its header")


def _write(path: Path, flags: int, pieces: Frame, doing: str) -> None:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            for at, data in pieces:
                _write_at(fd, path, at, data)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, path, doing) from error


def _write_at(fd: int, path: Path, at: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            done = os.pwrite(fd, rest, at)
        except InterruptedError:
            continue
        if done <= 0:
            raise StorageError(f"{path}: the device takes no more bytes at {at:,}.")
        at += done
        rest = rest[done:]
