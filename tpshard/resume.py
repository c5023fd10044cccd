"""What an earlier run of the same plan has left that can be kept: found by its journal, proven by digest."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .execute import hash_extents
from .journal import Entry, Identity, Journal, changed_source, read_journal, require_same
from .openfiles import storage_error
from .planning import Plan
from .routing import Extent
from .stagefolder import remove_tree

Hash = Callable[[Sequence[Extent], Sequence[Path]], list[str]]


@dataclass
class Kept:
    """What need not be done again: digests by the number of the plan's write and read, and files that stay."""

    writes: dict[int, str] = field(default_factory=dict)
    reads: dict[int, str] = field(default_factory=dict)
    files: set[int] = field(default_factory=set)  # target files that exist in their full length
    nbytes: int = 0  # of the writes


def go_on(
    journal: Path, identity: Identity, plan: Plan, output: Path, sources: Sequence[Path], *,
    threads: int | None, tile_bytes: int | None, computed: bool,
) -> tuple[Journal, Kept]:  # fmt: skip
    """Read the journal in a staging directory, check by digest what it promises, and open it to be gone on with.

    Everything in ``output`` that is no target file of the plan is removed: it is written anew.

    Args:
        output: the directory that is being made.
        sources: the plan's source files.
        computed: what is read is worked out from the sources rather than lying in them: their stamps must be the same.

    Raises:
        UsageError: it is the journal of another run: of another plan, version, algorithm or source.
        StorageError: what the operating system reports.
    """
    found = read_journal(journal)
    if found is None:  # killed before its first line was whole: nothing had been done
        tidy(output, ())
        begun = Journal(journal)
        begun.begin(identity)
        return begun, Kept()
    changed = require_same(found.identity, identity, journal)

    def hashed(extents: Sequence[Extent], paths: Sequence[Path]) -> list[str]:
        return hash_extents(
            extents, paths, threads=threads, tile_bytes=tile_bytes, algorithm=identity.algorithm
        )

    if changed:
        if computed:
            raise changed_source(journal, changed[0], "its time of change or its inode is another")
        _require_same_bytes(found.entries, plan, sources, frozenset(changed), journal, hashed)
    tidy(output, [file.name for file in plan.target.files])
    kept = _kept(found.entries, plan, output, hashed)
    return Journal(journal, found.chain, found.size), kept


def require_finished(journal: Path, identity: Identity) -> None:
    """Refuse a journal that is not of the run ``identity``.

    Raises:
        UsageError: it is of another plan, version, algorithm or source.
        StorageError: it cannot be read.
    """
    found = read_journal(journal)
    changed = () if found is None else require_same(found.identity, identity, journal)
    if changed:
        raise changed_source(journal, changed[0], "its time of change or its inode is another")


def tidy(output: Path, names: Sequence[str]) -> None:
    """Remove everything below ``output`` but the files ``names`` (posix paths relative to it) and their directories.

    Raises:
        StorageError: what the operating system reports.
    """
    wanted = {os.path.join(output, name) for name in names}
    above = {os.fspath(parent) for name in wanted for parent in Path(name).parents}
    try:
        for at, folders, files in os.walk(output):
            for name in [*folders, *files]:
                path = Path(at, name)
                if os.fspath(path) in above and not path.is_symlink() and path.is_dir():
                    continue
                if os.fspath(path) not in wanted or not _is_plain(path):
                    remove_tree(path)
            folders[:] = [name for name in folders if os.path.isdir(os.path.join(at, name))]
    except OSError as error:
        raise storage_error(error, output, "clearing what is to be written anew") from error


def _is_plain(path: Path) -> bool:
    """Whether it is a file of its own: neither a link nor one of several names of a file."""
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _kept(entries: Sequence[Entry], plan: Plan, output: Path, hashed: Hash) -> Kept:
    paths = [output / file.name for file in plan.target.files]
    kept = Kept()
    for number, (path, file) in enumerate(zip(paths, plan.target.files, strict=True)):
        try:
            if os.lstat(path).st_size == file.size:
                kept.files.add(number)
            else:
                os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, path, "looking at it") from error
    promised = _promised(entries, len(plan.writes), writes=True)
    here = [number for number in promised if plan.writes[number].file in kept.files]
    found = hashed([plan.writes[number] for number in here], paths)
    whole = {number for number, digest in zip(here, found, strict=True) if digest == promised[number]}
    reads = _promised(entries, len(plan.reads), writes=False)
    for task in plan.tasks:
        if task.writes and whole.issuperset(task.writes):
            kept.writes |= {number: promised[number] for number in task.writes}
            kept.reads |= {number: reads[number] for number in task.reads if number in reads}
    kept.nbytes = sum(plan.writes[number].nbytes for number in kept.writes)
    return kept


def _promised(entries: Sequence[Entry], count: int, *, writes: bool) -> dict[int, str]:
    """Digests by number; where two entries speak of one extent the later one counts."""
    out: dict[int, str] = {}
    for entry in entries:
        pair = (entry.writes, entry.write_digests) if writes else (entry.reads, entry.read_digests)
        out.update((number, digest) for number, digest in zip(*pair, strict=True) if number < count)
    return out


def _require_same_bytes(
    entries: Sequence[Entry], plan: Plan, sources: Sequence[Path], changed: frozenset[str], journal: Path, hashed: Hash
) -> None:
    """Hash what was read of files whose stamps differ: a file that was only touched or copied is still the same."""
    known = _promised(entries, len(plan.reads), writes=False)
    done = frozenset(_promised(entries, len(plan.writes), writes=True))
    number_of = {n: os.path.abspath(path) for n, path in enumerate(sources) if os.path.abspath(path) in changed}
    wanted: list[int] = []
    for task in plan.tasks:
        if done.issuperset(task.writes):
            wanted += [number for number in task.reads if plan.reads[number].file in number_of]
    for number in wanted:
        if number not in known:
            extent = plan.reads[number]
            why = f"no digest was taken of {extent.tensor} that would tell"
            raise changed_source(journal, number_of[extent.file], why)
    digests: Mapping[int, str] = dict(zip(wanted, hashed([plan.reads[n] for n in wanted], sources), strict=True))
    for number, digest in digests.items():
        if digest != known[number]:
            extent = plan.reads[number]
            raise changed_source(journal, number_of[extent.file], f"{extent.tensor} has another digest now")


