"""What lies in a checkpoint's directory: which files are weights, which are carried, which are left out.

Links to files are followed (a hub cache holds nothing else), links to directories are not. A FIFO, a
socket or a device is never opened. Only names and sizes are looked at here, no content.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tpshard.errors import DamagedError, StorageError

MAX_FILES = 10_000
MAX_DEPTH = 32

CARD = "tpshard-verification.json"  # of a verification of other files than those to be written
_SKIPPED = frozenset({".git", ".cache", "__pycache__", ".DS_Store", ".locks", ".ipynb_checkpoints", CARD})
_OTHER_DIRECTORIES = re.compile(r"original|checkpoint-[0-9]+|global_step[0-9]+")
_RANK_FILE = re.compile(r"model-tp-[0-9]+-of-[0-9]+(-[0-9]+-of-[0-9]+)?\.safetensors")
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|ggml|onnx|onnx_data|tflite|ot|npz|npy|pkl|pickle|incomplete)"
    r"|.*\.(safetensors|bin|msgpack|h5)\.index(\.[^./]*)?\.json"
    r"|.*\.onnx\.data|.*\.onnx_data_[0-9]+"
)


def shown(path: str | os.PathLike[str]) -> str:
    """A path as printable text: bytes that are not UTF-8 as backslash escapes, control characters too."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(mode: int) -> str:
    """What a path that is no regular file is, by the mode in its ``os.stat`` result."""
    return _KINDS.get(stat.S_IFMT(mode), "neither a file nor a directory")


PARTIAL_SUFFIX = ".tpshard-partial"  # of the directory in which an output is made; the mark inside bears this name

GONE = "the current directory has been removed; change to one that exists (cd) and run again"


def current_directory_is_gone() -> bool:
    """Whether relative paths have lost their meaning: the directory that they start from has been removed."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def rank_files(names: Iterable[str]) -> list[str]:
    """Those of the names that tpshard gives to ranks' files, sorted."""
    return sorted(name for name in names if _RANK_FILE.fullmatch(name))


def is_weights(path: str) -> bool:
    """Whether a posix path names weights (or their index) in any format, by its ending alone."""
    return _WEIGHTS.fullmatch(path.rsplit("/", 1)[-1].lower()) is not None


@dataclass
class Listing:
    """The files below ``root``, each by its posix path relative to it."""

    root: Path
    sizes: dict[str, int] = field(default_factory=dict)  # regular files, links to them included
    broken: dict[str, str] = field(default_factory=dict)  # links that lead nowhere -> why
    left_out: list[tuple[str, str]] = field(default_factory=list)  # (path, why)
    special: list[str] = field(default_factory=list)  # those of left_out that are devices, FIFOs, sockets

    def why_not(self, path: str) -> str:
        """Why ``path`` is not among the regular files."""
        if path in self.broken:
            return self.broken[path]
        for left, reason in self.left_out:
            if path == left or (left.endswith("/") and path.startswith(left)):
                return reason
        return "there is no such file"


def storage_error(error: OSError, path: str | os.PathLike[str], doing: str) -> StorageError:
    """The :class:`StorageError` for ``error``, met while ``doing`` something with ``path``."""
    reason = error.strerror or type(error).__name__
    return StorageError(f"{shown(path)}: {doing} failed: {reason}. Check its permissions and the disk, then try again.")


def list_directory(root: Path) -> Listing:
    """List the files below ``root``, at most 10,000 of them and at most 32 directories deep.

    Beyond these bounds :class:`DamagedError`; a directory that cannot be read, :class:`StorageError`.
    """
    listing = Listing(root)
    _walk(listing, os.fspath(root), "", 0)
    return listing


def _walk(listing: Listing, directory: str, prefix: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise DamagedError(
            f"{shown(directory)} lies more than {MAX_DEPTH} directories deep; a checkpoint does not. Give the "
            "directory that holds config.json, or move the rest away."
        )
    try:
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise storage_error(error, directory, "listing the directory") from None
    for entry in found:
        path = prefix + entry.name
        try:
            entry.name.encode("utf-8")
        except UnicodeEncodeError:
            listing.left_out.append((shown(path), "its name is not UTF-8"))
            continue
        _place(listing, entry, path, depth)
        if len(listing.sizes) + len(listing.broken) + len(listing.left_out) > MAX_FILES:
            raise DamagedError(
                f"{shown(listing.root)} holds more than {MAX_FILES:,} files; a checkpoint does not. Give the directory "
                "that holds config.json, or move the rest away."
            )


def _place(listing: Listing, entry: os.DirEntry[str], path: str, depth: int) -> None:
    try:
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            try:
                status = os.stat(entry.path)
            except PermissionError:
                raise
            except OSError as error:
                target = shown(os.readlink(entry.path))
                kind = "goes round in a circle" if error.errno == errno.ELOOP else "dangles"
                listing.broken[path] = f"it is a link to {target} that {kind}"
                return
            if stat.S_ISDIR(status.st_mode):
                listing.left_out.append((path + "/", "a link to a directory, which is not followed"))
                return
        else:
            status = entry.stat(follow_symlinks=False)
    except OSError as error:
        raise storage_error(error, entry.path, "looking at it") from None
    if stat.S_ISDIR(status.st_mode):
        if entry.name in _SKIPPED:
            listing.left_out.append((path + "/", "not part of a checkpoint"))
        elif _OTHER_DIRECTORIES.fullmatch(entry.name):
            listing.left_out.append((path + "/", "weights or training state in another form"))
        else:
            _walk(listing, entry.path, path + "/", depth + 1)
    elif not stat.S_ISREG(status.st_mode):
        link = f"a link to {shown(os.readlink(entry.path))}, " if stat.S_ISLNK(mode) else ""
        listing.left_out.append((path, f"{link}{kind_of(status.st_mode)}"))
        listing.special.append(path)
    elif entry.name in _SKIPPED:
        listing.left_out.append((path, "not part of a checkpoint"))
    else:
        listing.sizes[path] = status.st_size
