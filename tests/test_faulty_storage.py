"""Storage that fails, lies or is slow, under each of the three operations: never a wrong byte, always a named file."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from faultyfiles import Layer, folding_case, layered, raising
from unfinished import VERBS, Operation, small
from weights import tree

from tpshard import output, split
from tpshard.errors import DamagedError, StorageError, TpshardError
from tpshard.options import Options

__all__ = ["small"]


@pytest.fixture(autouse=True)
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that even a small model takes many calls."""
    monkeypatch.setattr(output, "move_settings", lambda threads, memory: (2, 2048))


def names_a_file(error: BaseException, *folders: Path) -> bool:
    """Whether a message names a file or directory below one of the folders."""
    return any(re.search(re.escape(str(folder)) + r"[\w./-]*", str(error)) for folder in folders)


@pytest.mark.parametrize("verb", VERBS)
def test_short_reads_and_writes_and_interruptions(verb: str, small: dict[str, Operation], tmp_path: Path) -> None:
    pick = random.Random(verb)

    def interrupted(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name in ("pwrite", "preadv") and pick.random() < 0.2:
            raise InterruptedError(errno.EINTR, "Interrupted system call")

    def limit(size: int) -> int:
        return pick.randint(1, size) if size > 1 else size

    with layered(Layer(fault=interrupted, limit=limit)) as layer:
        small[verb](tmp_path / "out")
    assert layer.reads + layer.writes > 100
    assert tree(tmp_path / "out") == small[verb].expected


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("preadv", errno.EIO), ("preadv", errno.ESTALE), ("pread", errno.EIO), ("read", errno.EIO),
        ("pwrite", errno.EIO), ("pwrite", errno.ENOSPC), ("pwrite", errno.EDQUOT), ("pwrite", errno.EFBIG),
        ("write", errno.EIO), ("ftruncate", errno.ENOSPC), ("mkdir", errno.EROFS), ("open", errno.EMFILE),
        ("open", errno.EACCES), ("rename", errno.EIO), ("write", errno.ENOSPC),
    ],
)  # fmt: skip
def test_a_call_that_fails(
    call: str, code: int, verb: str, small: dict[str, Operation], tmp_path: Path
) -> None:
    """At several places of its sequence: the first, the last, and between; the old output stays."""
    operation, out = small[verb], tmp_path / "out"
    operation(out)
    before = tree(out)
    counts = []

    def count(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == call:
            counts.append(number)

    with layered(Layer(fault=count)):
        operation(out, overwrite=True)
    assert counts
    failed = 0
    for at in sorted({0, len(counts) // 2, len(counts) - 1}):
        with layered(Layer(fault=raising(code, on=call, at=at))):
            try:
                operation(out, overwrite=True)
            except StorageError as error:
                failed += 1
                assert names_a_file(error, tmp_path, operation.source), error
                assert os.strerror(code) in str(error)
        assert tree(out) == before
        shutil.rmtree(tmp_path / "out.tpshard-partial", ignore_errors=True)
        assert os.listdir(tmp_path) == ["out"]
    assert failed


def test_a_failing_close_is_not_passed_over(small: dict[str, Operation], tmp_path: Path) -> None:
    """Network file systems tell of a lost write when the file is closed."""
    real, lost = os.close, []

    def close(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)
        if name.endswith(".safetensors") and "partial" in name and not lost:
            lost.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(StorageError) as caught:
            small["split"](tmp_path / "out")
    assert Path(lost[0]).name in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_that_shrinks_or_grows_or_goes(verb: str, small: dict[str, Operation], tmp_path: Path) -> None:
    for harm in ("shrink", "grow", "gone", "rewrite"):
        source = Path(shutil.copytree(small[verb].source, tmp_path / harm))
        victim = sorted(source.glob("*.safetensors"))[-1]
        done = []

        def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
            if name == "pwrite" and not done:  # noqa: B023
                done.append(1)  # noqa: B023
                if harm == "shrink":  # noqa: B023
                    os.truncate(victim, 500)  # noqa: B023
                elif harm == "grow":  # noqa: B023
                    os.truncate(victim, victim.stat().st_size + 1)  # noqa: B023
                elif harm == "rewrite":  # noqa: B023
                    raw = victim.read_bytes()  # noqa: B023
                    victim.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))  # noqa: B023
                else:
                    victim.unlink()  # noqa: B023

        with layered(Layer(fault=fault)), pytest.raises(TpshardError) as caught:
            small[verb]._replace(source=source)(tmp_path / "out")
        assert done
        assert victim.name in str(caught.value)
        assert isinstance(caught.value, (DamagedError, StorageError))
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.tpshard-partial").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_slow_storage_changes_nothing(verb: str, small: dict[str, Operation], tmp_path: Path) -> None:
    pick = random.Random(0)

    def slow(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name in ("preadv", "pwrite") and pick.random() < 0.2:
            time.sleep(0.005)

    with layered(Layer(fault=slow)):
        small[verb](tmp_path / "out")
    assert tree(tmp_path / "out") == small[verb].expected


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(
    code: int, small: dict[str, Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    notes: list[str] = []
    small["split"](tmp_path / "out", note=notes.append)
    assert tree(tmp_path / "out") == small["split"].expected
    assert any("cannot be locked" in note for note in notes)


def test_names_that_differ_in_case_only(tmp_path: Path, small: dict[str, Operation]) -> None:
    """Where README and readme are one file, a checkpoint that holds both is refused, and neither is lost silently."""
    source = Path(shutil.copytree(small["split"].source, tmp_path / "source"))
    (source / "README.md").write_text("one")
    (source / "readme.md").write_text("other")
    out = tmp_path / "out"
    with layered(Layer(fault=folding_case)), pytest.raises(StorageError, match=r"(?i)readme\.md.*File exists"):
        split(source, out, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    (source / "readme.md").unlink()
    with layered(Layer(fault=folding_case)):
        split(source, out, 2, options=Options())
    assert (out / "README.md").read_text() == "one"
    (source / "TPSHARD.JSON").write_text("{}")
    with layered(Layer(fault=folding_case)), pytest.raises(StorageError, match=r"(?i)tpshard\.json.*File exists"):
        split(source, tmp_path / "second", 2)


def test_every_fault_at_every_place(small: dict[str, Operation], tmp_path: Path) -> None:
    """One call of all, whichever it is, fails with EIO: the output is whole or not there, and the file is named."""
    operation = small["merge"]
    with layered(Layer()) as layer:
        operation(tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole")
    failed = 0
    for number in range(0, layer.writes, max(1, layer.writes // 40)):

        def fault(name: str, at: int, args: tuple[Any, ...]) -> None:
            if at == number and name not in ("preadv", "pread", "read"):  # noqa: B023
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        out = tmp_path / str(number) / "out"
        out.parent.mkdir()
        with layered(Layer(fault=fault)):
            try:
                operation(out)
            except StorageError as error:
                failed += 1
                assert names_a_file(error, tmp_path, operation.source), error
        if out.exists():
            assert tree(out) == operation.expected
    assert failed > 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", VERBS)
def test_every_single_fault(verb: str, small: dict[str, Operation], tmp_path: Path) -> None:
    """As above, for every writing call of each operation, and every reading one."""
    operation = small[verb]
    with layered(Layer()) as layer:
        operation(tmp_path / "whole")
    for reading in (False, True):
        for number in range(layer.reads if reading else layer.writes):

            def fault(name: str, at: int, args: tuple[Any, ...]) -> None:
                if at == number and reading == (name in ("preadv", "pread", "read")):  # noqa: B023
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

            out = tmp_path / f"{reading}{number}" / "out"
            out.parent.mkdir()
            with layered(Layer(fault=fault)):
                try:
                    operation(out)
                except StorageError as error:
                    assert names_a_file(error, tmp_path, operation.source), error
            if out.exists():
                assert tree(out) == operation.expected
            shutil.rmtree(out.parent)
