"""Where an output may be made: apart from its source, and never in place of what tpshard did not make."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection
from pathlib import Path

from .errors import StorageError, UsageError
from .listing import GONE, PARTIAL_SUFFIX, current_directory_is_gone
from .openfiles import storage_error

_MANIFEST = "tpshard.json"


def partial_path(out: Path) -> Path:
    """Return the directory in which ``out`` is made: a sibling of it, links resolved.

    Raises UsageError where ``out`` is the root directory, StorageError where the current directory is gone.
    """
    real = real_path(out)
    if real == real.parent:
        raise UsageError(f"{out}: the root directory cannot be an output. Name a new directory.")
    return real.with_name(real.name + PARTIAL_SUFFIX)


def real_path(path: Path) -> Path:
    """Return a path with its links resolved. Raises StorageError where the current directory is gone."""
    try:
        return Path(os.path.realpath(path))
    except OSError as problem:
        if not path.is_absolute() and current_directory_is_gone():
            raise StorageError(f"{path}: {GONE}") from None
        raise storage_error(problem, path, "looking at it") from problem


def check_separate(src: Path, out: Path) -> None:
    """Raise UsageError where ``out`` is ``src``, lies in it or holds it, also through links.

    The partial directory of ``out`` is held to the same, since it may be cleared.
    """
    source = real_path(src)
    for made, name in ((real_path(out), "the output"), (partial_path(out), "its partial directory")):
        if _same(made, source):
            raise UsageError(f"{out}: {name} is the source itself ({source}). Name a directory outside of it.")
        if any(_same(above, source) for above in made.parents):
            raise UsageError(f"{out}: {name} lies inside the source {source}. Name a directory outside of it.")
        if any(_same(above, made) for above in source.parents):
            raise UsageError(f"{out}: {name} holds the source {source}. Name a directory that doesn't.")


def _same(one: Path, two: Path) -> bool:
    if one == two:
        return True
    try:
        return os.path.samestat(os.stat(one), os.stat(two))  # bind mounts, and names that differ in case only
    except OSError:
        return False


def check_output(out: Path, *, overwrite: bool, needed_bytes: int, written: Collection[str] = ()) -> None:
    """Refuse an output that cannot be made, before anything is written.

    ``written`` are the files that the output will hold, by posix path relative to it. With ``overwrite``
    a directory is replaced if it is an output of tpshard (it holds tpshard.json), or if none of its files
    would be lost: each is among ``written``.

    Raises UsageError where ``out`` is taken or must not be replaced, StorageError where its parent
    is missing or not writable, or has fewer than ``needed_bytes`` free bytes.
    """
    partial = partial_path(out)
    real = real_path(out)
    parent = real.parent
    _check_parent(out, parent)
    try:
        taken = real.lstat()
    except FileNotFoundError:
        pass
    except OSError as problem:
        raise storage_error(problem, real, "looking at it") from problem
    else:
        _check_replaceable(out, real, taken, overwrite, written)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(f"{out}: {parent} isn't writable. Change its mode or name another directory.")
    free = _free_bytes(parent) + _bytes_held(partial)
    if free < needed_bytes:
        raise StorageError(
            f"{out}: {needed_bytes:,} bytes are needed and {free:,} are free on the file system of {parent}: "
            f"{needed_bytes - free:,} short. Free some space or name a directory elsewhere."
        )


def _check_parent(out: Path, parent: Path) -> None:
    for above in (parent, *parent.parents):
        try:
            mode = os.stat(above).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as problem:
            raise storage_error(problem, above, "looking at it") from problem
        if not stat.S_ISDIR(mode):
            raise StorageError(f"{out}: {above} is a file, so nothing can lie in it. Name an output in a directory.")
        break
    if above != parent:
        quoted = shlex.quote(os.fspath(parent))
        raise StorageError(f"{out}: its parent directory {parent} doesn't exist. Make it first (mkdir -p {quoted}).")


def _check_replaceable(
    out: Path, real: Path, taken: os.stat_result, overwrite: bool, written: Collection[str]
) -> None:
    if not stat.S_ISDIR(taken.st_mode):
        raise UsageError(f"{out}: is a file, and is never overwritten. Name a directory.")
    if os.path.ismount(real):
        raise UsageError(f"{out}: is a mount point, which cannot be renamed. Name a new directory inside it.")
    here = None if current_directory_is_gone() else Path.cwd()
    if here is not None and any(_same(real, place) for place in (here, *here.parents)):
        raise UsageError(f"{out}: is the current directory or holds it. Name a new directory inside it.")
    home = Path(os.path.expanduser("~"))
    if any(_same(real, place) for place in (home, *home.parents)):
        raise UsageError(f"{out}: is the home directory or holds it. Name a new directory inside it.")
    try:
        empty = next(os.scandir(real), None) is None
    except OSError as problem:
        raise storage_error(problem, real, "listing it") from problem
    if not empty and not overwrite:
        raise UsageError(f"{out}: exists and isn't empty. Name a new directory, or replace this one with --overwrite.")
    if not empty and not (real / _MANIFEST).is_file():
        lost = _lost(real, frozenset(written))
        if lost is not None:
            raise UsageError(
                f"{out}: is not replaced: tpshard did not make it (it holds no {_MANIFEST}), and {lost} in it would be "
                "lost. Name a new directory, or move away what is in this one."
            )


def _lost(folder: Path, written: frozenset[str]) -> Path | None:
    """A file below ``folder`` that is none of ``written``; None where each is."""

    def fail(problem: OSError) -> None:
        raise storage_error(problem, Path(problem.filename), "listing it") from problem

    for at, folders, names in os.walk(folder, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        for name in sorted([*names, *links]):
            path = (Path(at) / name).relative_to(folder)
            if path.as_posix() not in written:
                return path
    return None


def _free_bytes(folder: Path) -> int:
    try:
        space = os.statvfs(folder)
    except OSError as problem:
        raise storage_error(problem, folder, "asking for its free space") from problem
    return space.f_bavail * space.f_frsize


def _bytes_held(folder: Path) -> int:
    held = 0
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                held += os.lstat(os.path.join(at, name)).st_blocks * 512
            except OSError:
                continue  # it is being removed
    return held
