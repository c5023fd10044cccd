"""Copies the files that aren't weights: bytes only, to ordinary files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import DamagedError, UsageError
from .openfiles import storage_error

_COPY_BYTES = 1 << 20


def copy_side_file(src: Path, dst: Path, *, inside: Path | None = None) -> int:
    """Copy a file's bytes to the new file ``dst``, making directories as needed; return its size in bytes.

    Links are followed, so the copy is an ordinary file, and its mode is 0666 less the umask whatever
    the source's is. Raises UsageError where ``dst`` steps out (``..``, or a link that leads out of
    ``inside``), DamagedError where the source isn't an ordinary file or changes its size meanwhile,
    StorageError for what the operating system reports.
    """
    if ".." in dst.parts:
        raise UsageError(f"{dst}: a side file's name must not step out of its directory with '..'")
    if inside is not None and Path(os.path.realpath(inside)) not in Path(os.path.realpath(dst)).parents:
        raise UsageError(f"{dst}: lies outside of {inside}")
    try:
        found = os.stat(src)
    except OSError as problem:
        raise storage_error(problem, src, "looking at it") from problem
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(f"{src}: isn't an ordinary file, so it cannot be copied. Remove it or leave it out.")
    try:
        source = os.open(src, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as problem:
        raise storage_error(problem, src, "opening it") from problem
    try:
        copied = _copy_bytes(source, src, dst)
        size = os.fstat(source).st_size
    finally:
        os.close(source)
    if not copied == size == found.st_size:
        raise DamagedError(
            f"{src}: had {found.st_size:,} bytes, {copied:,} were copied and it has {size:,} now: it is being "
            "written to. Run again when it is at rest."
        )
    return copied


def _copy_bytes(source: int, src: Path, dst: Path) -> int:
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(dst, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        raise storage_error(problem, dst, "creating it") from problem
    copied = 0
    try:
        while True:
            try:
                data = os.read(source, _COPY_BYTES)
            except OSError as problem:
                raise storage_error(problem, src, f"reading at byte {copied:,}") from problem
            if not data:
                return copied
            done = 0
            while done < len(data):
                try:
                    done += os.write(target, memoryview(data)[done:])
                except OSError as problem:
                    raise storage_error(problem, dst, f"writing at byte {copied + done:,}") from problem
            copied += len(data)
    finally:
        os.close(target)
