"""Replacing an output and going back to it: one whole output or the other for everyone, at every moment."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from commands import ok, refused, tpshard
from unfinished import Operation, small
from weights import tree

from tpshard import publish, rollback
from tpshard.errors import DamagedError, StorageError, UsageError
from tpshard.shards import open_shards
from tpshard.stagefolder import MARK

__all__ = ["small"]


@pytest.fixture(params=[True, False], ids=["exchange", "renames"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr("tpshard.publish.exchange", lambda one, two: False)
        monkeypatch.setattr("tpshard.previous.exchange", lambda one, two: False)
    return bool(request.param)


@pytest.mark.parametrize("mode", [0o755, 0o555])
def test_there_and_back(how: bool, mode: int, small: dict[str, Operation], tmp_path: Path) -> None:
    out = tmp_path / "out"
    old, new, third = small["split"], small["reshard"], small["merge"]
    old(out)
    out.chmod(mode)
    done = ok(*new.words(out), "--overwrite", "--keep-previous")
    assert "could not" not in done.err
    assert tree(out) == new.expected
    assert tree(tmp_path / "out.tpshard-previous") == old.expected
    assert (tmp_path / "out.tpshard-previous").stat().st_mode & 0o777 == mode
    values = json.loads(ok("rollback", out, "--json").out)
    assert values["schema"] == "tpshard.rollback/1"
    assert tree(out) == old.expected
    assert tree(tmp_path / "out.tpshard-previous") == new.expected
    assert "it holds what it held before" in ok("rollback", out).out  # and so it is undone
    assert tree(out) == new.expected
    third(out, overwrite=True, keep_previous=True)  # the one that was kept before makes way
    assert tree(tmp_path / "out.tpshard-previous") == new.expected
    assert rollback(out).kept is not None
    assert tree(out) == new.expected
    shutil.rmtree(out)
    assert rollback(out).kept is None
    assert tree(out) == third.expected
    assert os.listdir(tmp_path) == ["out"]


def test_nothing_to_go_back_to(small: dict[str, Operation], tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(2, "rollback", out, says=("nothing to go back to", "--keep-previous"))
    small["split"](out)
    small["split"](out, overwrite=True)
    refused(2, "rollback", out, says=("nothing to go back to",))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.tpshard-previous").symlink_to("elsewhere")
    refused(2, "rollback", out, says=("nothing to go back to",))
    refused(2, *small["split"].words(out), "--overwrite", "--keep-previous", says=("in the way",))
    assert tree(out) == small["split"].expected
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out", "out.tpshard-previous"]


def test_no_going_back_while_a_run_is_under_way(small: dict[str, Operation], tmp_path: Path) -> None:
    import fcntl

    out = tmp_path / "out"
    small["split"](out)
    small["reshard"](out, overwrite=True, keep_previous=True)
    partial = tmp_path / "out.tpshard-partial"
    partial.mkdir()
    (partial / MARK).write_text(f"{os.getpid()} here\n")
    held = os.open(partial, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="another run"):
        rollback(out)
    os.close(held)
    (partial / "journal").write_text("of an unfinished run")
    rollback(out)
    assert tree(out) == small["split"].expected
    assert (partial / "journal").exists(), "an unfinished run can still be gone on with"


def test_a_failing_exchange_leaves_both(small: dict[str, Operation], tmp_path: Path, monkeypatch: object) -> None:
    out = tmp_path / "out"
    small["split"](out)
    small["reshard"](out, overwrite=True, keep_previous=True)

    def fail(one: Path, two: Path) -> bool:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpshard.previous.exchange", fail)
        patch.setattr("tpshard.publish.exchange", fail)
        refused(5, "rollback", out, says=("out", "Input/output error"))
        refused(5, *small["split"].words(out), "--overwrite", says=("out", "Input/output error"))
    assert tree(out) == small["reshard"].expected
    assert tree(tmp_path / "out.tpshard-previous") == small["split"].expected
    assert sorted(os.listdir(tmp_path)) == ["out", "out.tpshard-previous"]


def test_readers_never_see_a_mixture(small: dict[str, Operation], tmp_path: Path) -> None:
    """While outputs of two degrees take each other's place, what opens and holds still is one or the other."""
    out, ended = tmp_path / "out", threading.Event()
    small["split"](out)
    known = {3: small["split"].expected, 2: small["reshard"].expected}
    seen: list[int] = []
    wrong: list[str] = []
    changes = [0]  # counted: two of them may bring back what a name stood for, which no stamp tells

    def look(place: Path, held: bool) -> None:
        before = changes[0]
        try:
            shards = open_shards(place)
            found = tree(place)
            shards.check_unchanged()
        except (DamagedError, UsageError, StorageError, OSError):
            return  # what was opened was deleted meanwhile, or a manifest met files of the other: it is refused
        if not held and (before % 2 or changes[0] != before):
            return  # a name came to mean something else while it was looked up file by file
        seen.append(shards.manifest.tp_size)
        if not found.items() <= known[shards.manifest.tp_size].items():  # of one that is deleted some are gone
            wrong.append(str(found))

    def holding() -> None:
        while not ended.is_set():
            folder = os.open(out, os.O_RDONLY)  # one directory, whatever its name comes to mean
            look(Path(f"/proc/self/fd/{folder}"), True)
            os.close(folder)

    def by_name() -> None:
        while not ended.is_set():
            look(out, False)

    readers = [threading.Thread(target=target) for target in (holding, by_name)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(8):
            for change in (
                lambda: small["reshard"](out, overwrite=True),
                lambda: small["split"](out, overwrite=True, keep_previous=True),
                lambda: rollback(out),
                lambda: rollback(out),
            ):
                changes[0] += 1
                change()
                changes[0] += 1
    finally:
        ended.set()
        for reader in readers:
            reader.join()
    assert not wrong
    assert set(seen) == {2, 3}


def test_exchange_says_where_it_cannot(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / "x").touch()
    if publish.exchange(one, two):
        assert os.listdir(two) == ["x"]
    with pytest.raises(FileNotFoundError):
        publish.exchange(one, tmp_path / "missing")


def test_what_fails_its_gate_lies_aside_under_a_name_that_says_so(
    small: dict[str, Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old output stays; what failed is beside it, whole, so that it can be looked into."""
    out = tmp_path / "out"
    small["reshard"](out)
    monkeypatch.setattr("tpshard.gated.verify", failing)
    done = tpshard(*small["split"].words(out), "--overwrite", "--verify", "quick")
    assert done.status == 1
    assert "out.tpshard-failed" in done.err
    assert tree(out) == small["reshard"].expected
    assert tree(tmp_path / "out.tpshard-failed") == small["split"].expected
    assert sorted(os.listdir(tmp_path)) == ["out", "out.tpshard-failed"]


def failing(*arguments: object, **more: object) -> object:
    from tpshard.reports import Verification

    return Verification("verify", "x", None, 3, levels=["structure"], passed=False, status=1)
