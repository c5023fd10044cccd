"""Side files: everything of a checkpoint that is not weights, carried byte for byte with its sha256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import DamagedError
from .filecopy import copy_side_file
from .listing import shown, storage_error
from .manifest import SideFile

_NAMED = 5  # changed files that a message names


def file_sha256(path: Path) -> str:
    """sha256 of a file, hex.

    Raises:
        StorageError: it cannot be read.
    """
    state = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(1 << 20):
                state.update(block)
    except OSError as error:
        raise storage_error(error, path, "reading it") from None
    return state.hexdigest()


def size_of(path: Path) -> int | None:
    """Bytes of an ordinary file, None where there is none.

    Raises:
        StorageError: it cannot be looked at.
    """
    try:
        return path.stat().st_size if path.is_file() else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error(error, path, "looking at it") from None


def require_inside(root: Path, paths: Iterable[str]) -> None:
    """Refuse side files that links lead out of the directory: what lies there is not the checkpoint's to carry.

    In a hub cache, where a revision is links and nothing else, they may lead to the blobs of the same model.

    Raises:
        DamagedError: one leads out; names it, and to where.
    """
    home = Path(os.path.realpath(root))
    cached = home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir()
    allowed = (home, home.parent.parent / "blobs") if cached else (home,)
    for path in paths:
        real = Path(os.path.realpath(root / path))
        if not any(folder in real.parents for folder in allowed):
            raise DamagedError(
                f"{shown(root / path)} is a link that leads out of the directory, to {shown(real)}; it is not carried. "
                "Put the file itself there, or remove the link"
            )


def copy_sides(root: Path, output: Path, paths: Iterable[str]) -> tuple[SideFile, ...]:
    """Copy side files into a directory that is being made; returns what arrived.

    Raises:
        UsageError, DamagedError, StorageError: as :func:`tpshard.filecopy.copy_side_file`.
    """
    copied = []
    for path in paths:
        size = copy_side_file(root / path, output / path, inside=output)
        copied.append(SideFile(path, size, file_sha256(output / path)))
    return tuple(copied)


def changed_sides(root: Path, promised: Iterable[SideFile]) -> Iterator[tuple[str, str]]:
    """``(path, what changed)`` of every side file that is no longer what was carried.

    Raises:
        DamagedError: one is missing.
        StorageError: one cannot be read.
    """
    for side in promised:
        size = size_of(root / side.path)
        if size is None:
            raise DamagedError(f"{shown(root / side.path)} is missing; copy it again from where the shards came from")
        if size != side.size:
            yield side.path, f"it has {size} bytes where {side.size} were written"
        elif file_sha256(root / side.path) != side.sha256:
            yield side.path, f"its sha256 is no longer {side.sha256}"


def require_unchanged_sides(root: Path, changed: Iterable[tuple[str, str]]) -> None:
    """Refuse side files that are no longer what was carried: what is made of them would not be the source's.

    Raises:
        DamagedError: there is one; names it, what changed, and the remedy.
    """
    found = list(changed)
    if found:
        told = "; ".join(f"{shown(root / path)} was changed since the split: {what}" for path, what in found[:_NAMED])
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise DamagedError(f"{told}{more}. Put the original back, or carry what is there now with --allow-changed")
