"""Opens a directory of shards: its manifest, its files, and whether the two belong together."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import manifest as manifests
from .errors import DamagedError, StorageError, TpshardError, UsageError
from .header import WeightsFile
from .listing import shown, storage_error
from .manifest import Manifest, RankFile
from .opened import Stamp, open_weights, require_unchanged
from .place import place_opened, rank_metadata
from .plan import Placed


class Problem(NamedTuple):
    """Something in a directory of shards that is not as its manifest says."""

    file: str
    message: str


@dataclass(frozen=True)
class Shards:
    """A directory of shards whose files have the structure that the manifest promises."""

    root: Path
    manifest: Manifest
    files: tuple[WeightsFile, ...]  # in the manifest's order
    placed: Placed
    stamps: tuple[Stamp, ...]

    def expected(self) -> dict[int, str]:
        """The promised digest of every stored tensor, by its number in the reads of a plan from this layout."""
        if not self.manifest.algorithm:
            return {}
        by_place = {
            (number, info.name): digest
            for number, (file, recorded) in enumerate(zip(self.files, self.manifest.files, strict=True))
            for info, digest in zip(file.tensors, recorded.digests, strict=True)
        }
        flat = (extent for row in self.placed.extents for extent in row if extent is not None)
        return {number: by_place[extent.file, extent.tensor] for number, extent in enumerate(flat)}

    def paths(self) -> list[Path]:
        """The ranks' files, in the manifest's order."""
        return [self.root / file.name for file in self.files]

    def check_unchanged(self) -> None:
        """Raise DamagedError if a file is no longer the one that was opened."""
        require_unchanged(self.root, [file.name for file in self.files], self.stamps)


def given_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path that a caller gave for ``what``.

    Raises:
        UsageError: it is empty, or no path at all.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        raise UsageError(f"{text!r:.200} is no path for {what}; name a directory")
    return Path(text)


def is_shards(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a manifest, and is thus a finished split."""
    text = os.fspath(path)
    return bool(text) and "\0" not in text and os.path.lexists(os.path.join(text, manifests.NAME))


def read_manifest(root: Path) -> Manifest:
    """Read and check ``tpshard.json``.

    Raises:
        UsageError: there is none, so the directory is not (or not yet) a finished split.
        DamagedError: it is damaged or was edited.
        UnsupportedError: it is of a newer version.
        StorageError: it cannot be read.
    """
    path = root / manifests.NAME
    try:
        if not stat.S_ISDIR(os.stat(root).st_mode):
            raise UsageError(f"{shown(root)} is a file. Give the directory that holds it.")
        size = os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        raise _no_shards(root) from None
    except OSError as error:
        raise storage_error(error, path, "looking at it") from None
    try:
        if size > manifests.LARGEST:
            raise DamagedError(f"{shown(path)} has {size} bytes; a manifest has at most {manifests.LARGEST}")
        raw = path.read_bytes()
    except OSError as error:
        raise storage_error(error, path, "reading it") from None
    return manifests.parsed(raw, shown(path))


def _no_shards(root: Path) -> UsageError:
    if not os.path.lexists(root):
        return UsageError(f"There is no directory {shown(root)}. Give one that 'tpshard split' has made.")
    hint = (
        "it is a checkpoint that has not been split; use 'tpshard split'"
        if (root / "config.json").exists()
        else "a split that did not finish leaves no such file: split again"
    )
    return UsageError(f"{shown(root)} holds no {manifests.NAME}: {hint}")


def open_shards(path: str | os.PathLike[str]) -> Shards:
    """Open a directory of shards and check its structure: every file there, of the right rank, size and tensors.

    Raises:
        DamagedError: a file is missing, damaged, or of another rank, degree, model or run; names it.
        UsageError, UnsupportedError, StorageError: as :func:`read_manifest`.
    """
    root = given_path(path, "the shards")
    manifest = read_manifest(root)
    opened: list[tuple[WeightsFile, Stamp]] = []
    for problem in check_files(root, manifest, opened):
        raise DamagedError(f"{problem.message}; copy the file again, or split again")
    files = tuple(file for file, _ in opened)
    placed = place_opened(manifest.layout, [(f, r.rank) for f, r in zip(files, manifest.files, strict=True)])
    return Shards(root, manifest, files, placed, tuple(stamp for _, stamp in opened))


def check_files(root: Path, manifest: Manifest, opened: list[tuple[WeightsFile, Stamp]]) -> Iterator[Problem]:
    """Hold every rank's file against the manifest, by its header alone; good files are added to ``opened``."""
    by_rank: dict[int, list[RankFile]] = {rank: [] for rank in range(manifest.tp_size)}
    for recorded in manifest.files:
        by_rank[recorded.rank].append(recorded)
    for rank, files in by_rank.items():
        if not files:
            yield Problem(manifests.NAME, f"{shown(root / manifests.NAME)} lists no file for rank {rank}")
    for recorded in manifest.files:
        path = root / recorded.name
        if _is_missing(path):
            yield Problem(recorded.name, f"{shown(path)} is missing: the file of rank {recorded.rank}")
            continue
        try:
            file, stamp = open_weights(root, recorded.name, "safetensors")
        except StorageError:
            raise
        except TpshardError as error:
            yield Problem(recorded.name, str(error))
            continue
        message = _mismatch(manifest, recorded, file)
        if message:
            yield Problem(recorded.name, f"{shown(path)} {message}")
        else:
            opened.append((file, stamp))
    if len(opened) == len(manifest.files):
        try:
            place_opened(manifest.layout, [(f, r.rank) for (f, _), r in zip(opened, manifest.files, strict=True)])
        except DamagedError as error:
            yield Problem(manifests.NAME, str(error))


def _is_missing(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        raise storage_error(error, path, "looking at it") from None
    return False


def _mismatch(manifest: Manifest, recorded: RankFile, file: WeightsFile) -> str:
    """Why the file is not the one that the manifest lists; "" if it is."""
    wanted = rank_metadata(recorded.rank, manifest.tp_size, manifest.layout.digest, manifest.content)
    if "tpshard.rank" not in file.metadata:
        return "was not written by tpshard"
    told = {
        "tpshard.rank": "is of rank {found} where rank {wanted} belongs",
        "tpshard.tp_size": "was cut for {found} ranks, not {wanted}",
        "tpshard.layout": "was cut by another layout",
        "tpshard.content": "holds the weights of another model or run",
    }
    for key, text in told.items():
        found = file.metadata.get(key)
        if found != wanted[key]:
            return text.format(found=found, wanted=wanted[key])
    if file.size != recorded.size:
        return f"has {file.size} bytes where {recorded.size} were written"
    if manifest.algorithm and len(file.tensors) != len(recorded.digests):
        return f"holds {len(file.tensors)} tensors where {len(recorded.digests)} were written"
    return ""
