"""The journal of a conversion: which stored tensors have been written whole, and their digests.

It lies beside what is being made, in the staging directory, and is appended to as units of work are finished. A
line is JSON, a space, and a checksum of that JSON chained to the line before: a line that was torn, and all that
follows it, doesn't count. The first line says of what run it is; a run of another plan, version or source doesn't
go on from it. A line is no promise that the bytes have reached the device: whoever goes on hashes them again.
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from .digest import WIDTHS
from .errors import StorageError, UsageError
from .listing import shown
from .openfiles import storage_error
from .planning import Plan

VERSION = 1
LARGEST = 1 << 30  # bytes; 10,000 tensors on 64 ranks take some 30 MB
_ANEW = "Run without --resume to start anew, which clears what was done"


@dataclass(frozen=True)
class Stamped:
    """A source file as it was when the run began: path, size in bytes, time of change in ns, inode."""

    path: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Identity:
    """Of what run a journal is."""

    tpshard: str  # its version
    verb: str
    plan: str  # sha256 over what the plan joins
    algorithm: str
    sources: tuple[Stamped, ...]


class Entry(NamedTuple):
    """What one unit of work wrote and read: numbers of the plan's extents, and their digests.

    Of what was read only extents that passed whole are named.
    """

    writes: Sequence[int]
    write_digests: Sequence[str]
    reads: Sequence[int]
    read_digests: Sequence[str]


def plan_key(plan: Plan) -> str:
    """sha256 over the two placed layouts that a plan joins, hex: what :attr:`Plan.digest` is worked out from.

    A plan is a function of the two and of this version of tpshard; its own text takes as long as making it.
    """
    state = sha256()
    for placed, extents in ((plan.source, plan.reads), (plan.target, plan.writes)):
        names = json.dumps([placed.layout.digest, placed.files, [extent.tensor for extent in extents]])
        state.update(names.encode("utf-8", "surrogatepass"))
        for part in ("file", "offset", "nbytes"):
            state.update(array("Q", [getattr(extent, part) for extent in extents]).tobytes())
    return state.hexdigest()


def stamped(paths: Iterable[Path]) -> tuple[Stamped, ...]:
    """The files as they are now.

    Raises:
        StorageError: one cannot be looked at.
    """
    out = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise storage_error(error, path, "looking at it") from error
        out.append(Stamped(os.path.abspath(path), found.st_size, found.st_mtime_ns, found.st_ino))
    return tuple(out)


class Journal:
    """A journal that is being written. Threads may share it; lines are appended whole or, by a kill, torn."""

    def __init__(self, path: Path, chain: str = "", size: int = 0) -> None:
        self._path = path
        self._chain = chain
        self._size = size
        self._lock = threading.Lock()
        self.entries = 0  # written by this run
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise storage_error(error, path, "opening the journal") from error

    def begin(self, identity: Identity) -> None:
        """Write the first line."""
        self._append({"journal": VERSION, **asdict(identity)})

    def record(
        self, writes: Sequence[int], write_digests: Sequence[str], reads: Sequence[int], read_digests: Sequence[str]
    ) -> None:
        """Append what a unit of work has done, as in :class:`Entry`.

        Raises:
            StorageError: it cannot be written.
        """
        self._append([writes, "".join(write_digests), reads, "".join(read_digests)])
        self.entries += 1

    def close(self) -> None:
        os.close(self._fd)

    def _append(self, value: object) -> None:
        text = json.dumps(value, separators=(",", ":"))
        with self._lock:
            self._chain = _chained(self._chain, text.encode())
            rest = memoryview(f"{text} {self._chain}\n".encode())
            while rest:
                try:
                    done = os.pwrite(self._fd, rest, self._size)
                except InterruptedError:
                    continue
                except OSError as error:
                    raise storage_error(error, self._path, "appending to the journal") from error
                if done <= 0:
                    raise StorageError(f"{self._path}: the device takes no more bytes at {self._size:,}.")
                self._size += done
                rest = rest[done:]


class Read(NamedTuple):
    """A journal that was read: of what run it is, its whole entries, and where the next line belongs."""

    identity: Identity
    entries: list[Entry]
    chain: str
    size: int


def read_journal(path: Path) -> Read | None:
    """Read a journal; None where not even its first line is whole, so that nothing can be gone on from.

    Raises:
        UsageError: it is of another version of the journal's format.
        StorageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise storage_error(error, path, "reading the journal") from error
    entries: list[Entry] = []
    identity, chain, size = None, "", 0
    for value, line_chain, end in _lines(raw[:LARGEST]):
        if identity is None:
            identity = _identity(value, path)
            if identity is None:
                return None
        else:
            entry = _entry(value, WIDTHS.get(identity.algorithm, 0))
            if entry is None:
                break
            entries.append(entry)
        chain, size = line_chain, end
    return None if identity is None else Read(identity, entries, chain, size)


def _lines(raw: bytes) -> Iterator[tuple[Any, str, int]]:
    """Values of the whole lines, each with its digest and where it ends; in a chain, up to the first that is torn."""
    chain, at = "", 0
    while (end := raw.find(b"\n", at)) >= 0:
        text, _, told = raw[at:end].rpartition(b" ")
        chain = _chained(chain, text)
        if told != chain.encode():
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        at = end + 1
        yield value, chain, at


def _chained(chain: str, text: bytes) -> str:
    return sha256(chain.encode() + text).hexdigest()[:32]


def _identity(value: Any, path: Path) -> Identity | None:
    if not isinstance(value, dict) or "journal" not in value:
        return None
    if value["journal"] != VERSION:
        found = f"{value['journal']!r:.20}"
        raise UsageError(f"{shown(path)} has the format version {found}, which this tpshard doesn't read. {_ANEW}.")
    try:
        sources = tuple(Stamped(**source) for source in value["sources"])
        return Identity(**{f.name: value[f.name] for f in fields(Identity) if f.name != "sources"}, sources=sources)
    except (KeyError, TypeError):
        return None


def _entry(value: Any, width: int) -> Entry | None:
    """An entry, None for what is none."""
    try:
        writes, written, reads, read = value
        entry = Entry(writes, _cut(written, width), reads, _cut(read, width))
    except (TypeError, ValueError):
        return None
    numbered = all(type(number) is int and number >= 0 for number in (*entry.writes, *entry.reads))
    paired = len(entry.writes) == len(entry.write_digests) and len(entry.reads) == len(entry.read_digests)
    return entry if numbered and paired else None


def _cut(text: str, width: int) -> list[str]:
    return [text[at : at + width] for at in range(0, len(text), width)]


def require_same(found: Identity, now: Identity, where: Path) -> list[str]:
    """Refuse to go on from a journal of another run; returns the paths of sources whose stamps differ.

    Raises:
        UsageError: version, operation, plan or digest differ, or there are other source files; says which.
    """
    told: Mapping[str, str] = {
        "tpshard": f"by tpshard {found.tpshard}, and this is {now.tpshard}",
        "verb": f"by {found.verb}, and this is {now.verb}",
        "algorithm": f"with digests by {found.algorithm}, not {now.algorithm or 'none'}",
        "plan": "by another plan: the source, the degree or the size of files was another",
    }
    for name, reason in told.items():
        if getattr(found, name) != getattr(now, name):
            raise UsageError(f"{shown(where)} was begun {reason}. {_ANEW}.")
    if [source.path for source in found.sources] != [source.path for source in now.sources]:
        raise UsageError(f"{shown(where)} was begun from other source files. {_ANEW}.")
    changed = []
    for old, new in zip(found.sources, now.sources, strict=True):
        if old.size != new.size:
            raise UsageError(
                f"{shown(old.path)} was changed since {shown(where)} was begun: it had {old.size:,} bytes and has "
                f"{new.size:,} now. {_ANEW}."
            )
        if old != new:
            changed.append(old.path)
    return changed


def changed_source(where: Path, path: str, why: str) -> UsageError:
    """The error for a source that is not, or cannot be proven to be, what it was when the run began."""
    return UsageError(f"{shown(path)} was changed since {shown(where)} was begun: {why}. {_ANEW}.")
