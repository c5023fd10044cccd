"""Opens a directory of shards: its manifest, its files, and whether the two belong together."""

from __future__ import annotations

import os
import stat
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from . import manifest as manifests
from .counting import counted
from .errors import DamagedError, StorageError, TpshardError, UsageError
from .header import WeightsFile
from .listing import GONE, PARTIAL_SUFFIX, current_directory_is_gone, rank_files, shown, storage_error
from .manifest import Manifest, RankFile
from .manifestreader import parsed
from .opened import Stamp, open_weights, read_small, require_unchanged, same_start
from .place import Headed, place_native, place_opened, rank_metadata, sealed
from .planning import Placed


class Problem(NamedTuple):
    """Something in a directory of shards that is not as its manifest says."""

    file: str
    message: str


@dataclass(frozen=True)
class Shards:
    """A directory of shards whose files have the structure that the manifest promises."""

    root: Path
    manifest: Manifest
    placed: Placed
    stamps: tuple[Stamp, ...]  # of the ranks' files, in the manifest's order

    @cached_property
    def files(self) -> tuple[WeightsFile, ...]:
        """What the ranks' files hold by their own headers, in the manifest's order."""
        return tuple(open_weights(self.root, file.name, "safetensors")[0] for file in self.manifest.files)

    def expected(self) -> Mapping[int, str]:
        """The promised digest of every stored tensor, by its number in the reads of a plan from this layout."""
        return Promised(self.placed, self.manifest) if self.manifest.algorithm else {}

    def paths(self) -> list[Path]:
        """The ranks' files, in the manifest's order."""
        return [self.root / file.name for file in self.manifest.files]

    def check_unchanged(self) -> None:
        """Raise DamagedError if a file is no longer the one that was opened."""
        require_unchanged(self.root, [file.name for file in self.manifest.files], self.stamps)


class Promised(Mapping[int, str]):
    """The digests that a manifest promises, by the number of the stored tensor in a plan's reads."""

    def __init__(self, placed: Placed, manifest: Manifest) -> None:
        extents = [extent for row in placed.extents for extent in row if extent is not None]
        order = sorted(range(len(extents)), key=lambda n: (extents[n].file, extents[n].offset))  # stable, as in files
        self._files = array("L", [extent.file for extent in extents])
        self._at = array("L", bytes(len(extents) * array("L").itemsize))
        seen = [0] * len(placed.files)
        for number in order:
            file = extents[number].file
            self._at[number] = seen[file]
            seen[file] += 1
        self._digests = [file.digests for file in manifest.files]

    def __getitem__(self, number: int) -> str:
        try:
            return self._digests[self._files[number]][self._at[number]]
        except IndexError:
            raise KeyError(number) from None

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


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
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_shards(root) from None
    except OSError as error:
        raise storage_error(error, path, "looking at it") from None
    return parsed(read_small(path, manifests.LARGEST), shown(path))


def _no_shards(root: Path) -> TpshardError:
    """Why there is no manifest, as far as what else lies there tells."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        if not root.is_absolute() and current_directory_is_gone():
            return StorageError(f"{shown(root)}: {GONE}")
        return UsageError(f"There is no directory {shown(root)}. Give one that 'tpshard split' has made.")
    except OSError as error:
        return storage_error(error, root, "listing it")
    ranks = rank_files(names)
    lacks = f"{shown(root)} holds no {manifests.NAME}"
    within = (root.name, root.absolute().parent.name)
    if PARTIAL_SUFFIX in names or any(name.endswith(PARTIAL_SUFFIX) for name in within):
        again = "split (or reshard) again" if ranks else "merge again"
        return UsageError(f"{lacks}: it is what a run under way or one that was killed has written so far; {again}")
    if os.path.lexists(root / manifests.NAME):
        return DamagedError(f"{shown(root / manifests.NAME)} is a link that leads nowhere; copy the file itself")
    if ranks:
        return DamagedError(
            f"{lacks}, which says how its {counted(ranks, 'file')} of ranks (such as {ranks[0]}) were cut; "
            f"copy {manifests.NAME} from where they come from, or split again"
        )
    if "config.json" in names:
        return UsageError(f"{lacks}: it is a checkpoint that has not been split; use 'tpshard split'")
    return UsageError(f"{lacks}, nor anything of a split; give a directory that 'tpshard split' has made")


def open_shards(path: str | os.PathLike[str]) -> Shards:
    """Open a directory of shards and check its structure: every file there, of the right rank, size and tensors.

    Raises:
        DamagedError: a file is missing, damaged, or of another rank, degree, model or run; names it.
        UsageError, UnsupportedError, StorageError: as :func:`read_manifest`.
    """
    root = given_path(path, "the shards")
    manifest = read_manifest(root)
    checked = check_files(root, manifest)
    for problem in checked.problems:
        advised = problem.message.endswith(".")  # whole sentences say themselves what to do
        raise DamagedError(problem.message + ("" if advised else "; copy the file again, or split again"))
    return checked.shards(root, manifest)


@dataclass(frozen=True)
class Checked:
    """What holding the ranks' files against the manifest came to.

    ``opened`` are the files whose headers had to be read tensor by tensor; ``native`` is where the
    tensors lie if every header is, byte for byte, the one that tpshard writes.
    """

    problems: tuple[Problem, ...]
    native: Placed | None
    opened: tuple[tuple[WeightsFile | None, Stamp], ...]

    def shards(self, root: Path, manifest: Manifest) -> Shards:
        """The shards that were checked; only where there is no problem."""
        return Shards(root, manifest, self._placed(manifest), tuple(stamp for _, stamp in self.opened))

    def _placed(self, manifest: Manifest) -> Placed:
        """The layout where the files hold it."""
        if self.native is not None:
            return self.native
        files = [(file, recorded.rank) for (file, _), recorded in zip(self.opened, manifest.files, strict=True) if file]
        return place_opened(manifest.layout, files)


def check_files(root: Path, manifest: Manifest) -> Checked:
    """Hold every rank's file against the manifest, by its header alone.

    Headers that are what tpshard writes are compared as bytes, which needs no parsing; any other is
    read tensor by tensor.
    """
    problems: list[Problem] = []
    headed = _as_written(manifest)
    opened: list[tuple[WeightsFile | None, Stamp]] = []
    for number, recorded in enumerate(manifest.files):
        path = root / recorded.name
        if _is_missing(path):
            problems.append(Problem(recorded.name, f"{shown(path)} is missing: the file of rank {recorded.rank}"))
            continue
        if headed is not None:
            header = sealed(headed.headers[number], manifest.content)
            stamp = same_start(path, header, headed.placed.files[number].size)
            if stamp is not None:
                opened.append((None, stamp))
                continue
        try:
            file, stamp = open_weights(root, recorded.name, "safetensors")
        except StorageError:
            raise
        except TpshardError as error:
            problems.append(Problem(recorded.name, str(error)))
            continue
        message = _mismatch(manifest, recorded, file)
        if message:
            problems.append(Problem(recorded.name, f"{shown(path)} {message}"))
        else:
            opened.append((file, stamp))
    if problems:
        return Checked(tuple(problems), None, tuple(opened))
    if headed is not None and all(file is None for file, _ in opened):
        return Checked((), headed.placed, tuple(opened))
    files = [
        (file or open_weights(root, recorded.name, "safetensors")[0], stamp)
        for (file, stamp), recorded in zip(opened, manifest.files, strict=True)
    ]
    try:
        place_opened(manifest.layout, [(f, r.rank) for (f, _), r in zip(files, manifest.files, strict=True)])
    except DamagedError as error:
        problems.append(Problem(manifests.NAME, str(error)))
    return Checked(tuple(problems), None, tuple(files))


def _as_written(manifest: Manifest) -> Headed | None:
    """The files as tpshard writes them, if the manifest lists them so."""
    headed = place_native(manifest.layout, manifest.max_file_bytes)
    listed = [(file.name, file.size, file.rank) for file in manifest.files]
    counted = Counter(extent.file for row in headed.placed.extents for extent in row if extent is not None)
    told = [len(file.digests) for file in manifest.files]
    if listed != [tuple(file) for file in headed.placed.files]:
        return None
    if manifest.algorithm and told != [counted[number] for number in range(len(told))]:
        return None
    return headed


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
        return f"has {file.size:,} bytes where {recorded.size:,} were written"
    if manifest.algorithm and len(file.tensors) != len(recorded.digests):
        return f"holds {counted(file.tensors, 'tensor')} where {len(recorded.digests):,} were written"
    return ""
