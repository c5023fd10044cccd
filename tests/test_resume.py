"""Runs that end at any moment and are gone on with: the same bytes, nothing accepted before, little done again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ELSEWHERE, ok, refused, tpshard
from faultyfiles import Killed, Layer, layered
from hypothesis import given, settings
from hypothesis import strategies as st
from unfinished import VERBS, Operation, from_pretrained_takes, operations, places, require_unaccepted, small
from weights import tree

from tpshard import journal as journals
from tpshard import output
from tpshard.errors import StorageError, UsageError
from tpshard.journal import Identity, Journal, Stamped, read_journal
from tpshard.signals import Ended

__all__ = ["small"]


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread and small tiles, so that even a small model takes many units of work."""
    monkeypatch.setattr(output, "move_settings", lambda threads, memory: (1, 4096))


def killed_at(operation: Operation, out: Path, number: int, **options: object) -> bool:
    """Run it up to the given writing call; whether that was reached."""
    with layered(Layer(dies_at=number)) as layer:
        try:
            operation(out, **options)
        except Killed:
            return True
        assert not layer.dead
    return False


def journal_of(out: Path) -> Path:
    return places(out)[1] / "journal"


def journalled(out: Path) -> set[int]:
    """The writes that the journal of an unfinished run names."""
    path = journal_of(out)
    found = read_journal(path) if path.exists() else None
    return {number for entry in found.entries for number in entry.writes} if found else set()


# -- every writing call ------------------------------------------------------------------------


def calls_of(operation: Operation, out: Path, **options: object) -> int:
    with layered(Layer()) as layer:
        operation(out, **options)
    return layer.writes


def check_death(operation: Operation, folder: Path, number: int, load: bool) -> None:
    out = folder / "out"
    folder.mkdir()
    if killed_at(operation, out, number):
        assert not out.exists() or tree(out) == operation.expected
        require_unaccepted(out, [operation.expected], folder / "into")
        if load:
            for place in places(out):
                assert not from_pretrained_takes(place) or tree(place) == operation.expected
        known = journalled(out)
        report = None
        if not out.exists() or journal_of(out).exists():
            report = operation(out, resume=True)
        elif places(out)[1].exists():  # all that was left to do is to take it away
            with pytest.raises(UsageError, match="exists and isn't empty"):
                operation(out, resume=True)
            shutil.rmtree(places(out)[1], ignore_errors=True)
        if report is not None and known:
            assert report.bytes_kept > 0, "what the journal names is not done again"
    assert tree(out) == operation.expected
    assert not [place for place in places(out)[1:] if place.exists()]
    shutil.rmtree(folder)


@pytest.mark.parametrize("verb", VERBS)
def test_death_at_some_writing_calls(verb: str, small: dict[str, Operation], fine: None, tmp_path: Path) -> None:
    total = calls_of(small[verb], tmp_path / "whole")
    chosen = sorted({*range(0, total, total // 10), *range(total - 6, total)})
    for number in chosen:
        check_death(small[verb], tmp_path / str(number), number, load=False)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("verb", VERBS)
def test_death_at_every_writing_call(verb: str, small: dict[str, Operation], fine: None, tmp_path: Path) -> None:
    for number in range(calls_of(small[verb], tmp_path / "whole")):
        check_death(small[verb], tmp_path / str(number), number, load=number % 16 == 0)


@pytest.mark.parametrize("verb", ["split", "merge"])
def test_transformers_takes_nothing_unfinished(
    verb: str, small: dict[str, Operation], fine: None, tmp_path: Path
) -> None:
    total = calls_of(small[verb], tmp_path / "whole")
    for number in (total // 2, total - 12, total - 5):
        check_death(small[verb], tmp_path / str(number), number, load=True)


def test_at_most_what_was_in_flight_is_done_again(small: dict[str, Operation], fine: None, tmp_path: Path) -> None:
    operation, total = small["split"], calls_of(small["split"], tmp_path / "whole")
    for number in range(total // 3, total, total // 4):
        out = tmp_path / str(number)
        assert killed_at(operation, out, number)
        known = journalled(out)
        report = operation(out, resume=True)
        read = [extent for extent in range(10**6) if extent in known]
        assert read
        assert report.bytes_kept + report.bytes_written == sum(report.rank_bytes)
        moved = report.bytes_written / sum(report.rank_bytes)
        assert moved < 1 - number / total + 0.25, "one thread has one unit in flight, besides what is small"
        shutil.rmtree(out)


def test_deaths_in_a_row(small: dict[str, Operation], fine: None, tmp_path: Path) -> None:
    """Runs that go on and are killed too: each gets further."""
    operation, out, kept = small["reshard"], tmp_path / "out", -1
    for _ in range(100):
        if not killed_at(operation, out, 40, resume=True):
            break
        assert len(journalled(out)) >= kept
        kept = len(journalled(out))
        require_unaccepted(out, [operation.expected], tmp_path / "into")
    assert tree(out) == operation.expected
    assert os.listdir(tmp_path) == ["out"]


def test_death_while_an_output_is_replaced(small: dict[str, Operation], fine: None, tmp_path: Path) -> None:
    """At every call from the last write on the output is the old one or the new one, with and without exchange."""
    old, new = small["reshard"], small["split"]
    for exchange in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not exchange:
                patch.setattr("tpshard.publish.exchange", lambda one, two: False)
            for keep in (True, False):
                old(tmp_path / "out")
                total = calls_of(new, tmp_path / "out", overwrite=True, keep_previous=keep)
                shutil.rmtree(tmp_path / "out")
                shutil.rmtree(tmp_path / "out.tpshard-previous", ignore_errors=True)
                for number in range(total - 18 - 20 * (not keep), total, 1 if keep else 3):
                    out = tmp_path / "out"
                    old(out)
                    dead = killed_at(new, out, number, overwrite=True, keep_previous=keep)
                    if out.exists():
                        assert tree(out) in (old.expected, new.expected)
                    else:
                        assert not exchange
                        assert tree(places(out)[3]) == old.expected
                    require_unaccepted(out, [old.expected, new.expected], tmp_path / "into")
                    if dead:
                        new(out, overwrite=True, keep_previous=keep, resume=True)
                    assert tree(out) == new.expected
                    if keep:
                        assert tree(tmp_path / "out.tpshard-previous") in (old.expected, new.expected)
                        shutil.rmtree(tmp_path / "out.tpshard-previous")
                    assert os.listdir(tmp_path) == ["out"]
                    shutil.rmtree(out)


# -- random moments ----------------------------------------------------------------------------

SERVER = """
import os, sys
import tpshard.convert, tpshard.cli, numpy, xxhash, ctypes, resource, fcntl
from tpshard.registry import families
families()
for line in sys.stdin:
    words = line.rstrip("\\n").split("\\t")
    read, write = os.pipe()
    child = os.fork()
    if not child:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1); os.dup2(null, 2)
        os.read(read, 1)
        os._exit(tpshard.cli.run(words))
    print(child, flush=True)
    os.write(write, b"x")
    sys.stdin.readline()  # until then it is there to be killed, if only as a zombie
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os.close(read); os.close(write)
"""


class Runner:
    """Runs commands in processes of their own that need no start, to be killed at a moment."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], **ELSEWHERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __call__(self, words: list[str], seconds: float | None = None) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write("\t".join(words) + "\n")
        self._server.stdin.flush()
        pid = int(self._server.stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)
        self._server.stdin.write("\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


def kill_at_random(count: int, seed: int, runner: Runner, tmp_path: Path) -> None:
    done = operations(tmp_path / "made", hidden_size=256, head_dim=32, intermediate_size=2048, vocab_size=4001)
    pick, killed = random.Random(seed), 0
    took = {}
    for verb in VERBS:
        begun = time.monotonic()
        assert runner(done[verb].words(tmp_path / "warm")) == 0
        took[verb] = time.monotonic() - begun
        shutil.rmtree(tmp_path / "warm")
    while killed < count:
        operation = done[VERBS[killed % 3]]
        out = tmp_path / "out"
        words = operation.words(out)
        for _ in range(1 + pick.randrange(3)):  # some are killed again when they go on
            begun = time.monotonic()
            status = runner([*words, "--resume"], pick.random() * took[operation.verb])
            if status != -signal.SIGKILL:
                took[operation.verb] = min(took[operation.verb], time.monotonic() - begun)
                break
            killed += 1
            require_unaccepted(out, [operation.expected], tmp_path / "into")
        if not out.exists() or journal_of(out).exists():
            assert runner([*words, "--resume"]) == 0
        assert tree(out) == operation.expected
        assert set(os.listdir(tmp_path)) <= {"made", "out", places(out)[1].name}
        for place in places(out)[:2]:
            shutil.rmtree(place, ignore_errors=True)


def test_killed_at_15_random_moments(runner: Runner, tmp_path: Path) -> None:
    kill_at_random(15, 1, runner, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_at_200_random_moments(runner: Runner, tmp_path: Path) -> None:
    kill_at_random(200, 2, runner, tmp_path)


# -- what a journal is believed ----------------------------------------------------------------


def half_done(operation: Operation, out: Path) -> set[int]:
    total = calls_of(operation, out)
    shutil.rmtree(out)
    assert killed_at(operation, out, total // 2)
    assert journalled(out)
    return journalled(out)


def test_bytes_that_never_reached_the_device_are_written_again(
    small: dict[str, Operation], fine: None, tmp_path: Path
) -> None:
    """After a power cut the journal may be there and the data not: zeros, or a file that is too short."""
    for harm in ("zeros", "short", "gone", "link"):
        out = tmp_path / harm
        half_done(small["split"], out)
        rank = places(out)[2] / "model-tp-01-of-03.safetensors"
        if harm == "zeros":
            rank.write_bytes(bytes(rank.stat().st_size))
        elif harm == "short":
            os.truncate(rank, 1000)
        else:
            rank.unlink()
        if harm == "link":
            (tmp_path / "precious").write_bytes(bytes(100_000))
            rank.symlink_to(tmp_path / "precious")
        small["split"](out, resume=True)
        assert tree(out) == small["split"].expected
    assert (tmp_path / "precious").read_bytes() == bytes(100_000)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_damaged_journal_costs_time_only(small: dict[str, Operation], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context():
        patch.setattr(output, "move_settings", lambda threads, memory: (1, 4096))
        out = small["split"].source.parent / "damaged-journal"
        half_done(small["split"], out)
        path = places(out)[1] / "journal"
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["cut", "flip", "junk"]))
        if how == "cut":
            del raw[at:]
        elif how == "flip":
            raw[at] ^= data.draw(st.integers(1, 255))
        else:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=40))
        path.write_bytes(raw)
        small["split"](out, resume=True)
        assert tree(out) == small["split"].expected
        shutil.rmtree(out)


def test_a_changed_source_is_refused_with_the_reason(small: dict[str, Operation], fine: None, tmp_path: Path) -> None:
    source = Path(shutil.copytree(small["split"].source, tmp_path / "other" / "model"))
    operation = small["split"]._replace(source=source)
    name = "model-00001-of-00003.safetensors"
    raw = (source / name).read_bytes()

    def refuse(*says: str) -> None:
        before = tree(places(out)[1])
        with pytest.raises(UsageError) as caught:
            operation(out, resume=True)
        for word in (*says, "Run without --resume"):
            assert word in str(caught.value)
        assert tree(places(out)[1]).keys() == before.keys(), "what is refused is not deleted"

    out = tmp_path / "out"
    half_done(operation, out)
    (source / name).write_bytes(raw[:-5] + b"other")  # in the last tensor: of the first file all is done by now
    refuse(name, "another digest now")
    (source / name).write_bytes(raw)
    os.utime(source / name, ns=(1, 1))
    report = operation(out, resume=True)  # the same bytes at another time
    assert report.bytes_kept
    assert tree(out) == operation.expected
    for file in source.glob("*.safetensors"):
        assert file.stat().st_size
    shutil.rmtree(out)
    half_done(operation, out)
    with (source / name).open("ab") as file:
        file.write(b"more")
    with pytest.raises(Exception, match=name):
        operation(out, resume=True)
    assert places(out)[1].exists()


def test_another_plan_or_version_is_refused(
    small: dict[str, Operation], fine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    operation = small["split"]
    half_done(operation, out)
    words = ("split", operation.source, out)
    refused(2, *words, "--tp", 2, "--resume", says=("another plan", "Run without --resume"))
    refused(2, *words, "--tp", 3, "--max-file-size", "5KB", "--resume", says=("another plan",))
    refused(2, *words, "--tp", 3, "--digest", "sha256", "--resume", says=("xxh3_128", "sha256"))
    refused(2, *words, "--tp", 3, "--digest", "none", "--resume", says=("--digest none",))
    refused(2, "reshard", small["reshard"].source, out, "--tp", 3, "--resume", says=("by split", "this is reshard"))
    with monkeypatch.context() as patch:
        patch.setattr(output, "VERSION", "9.9")
        refused(2, *words, "--tp", 3, "--resume", says=("by tpshard 0.1.0, and this is 9.9",))
    with monkeypatch.context() as patch:
        patch.setattr(journals, "VERSION", 2)
        refused(2, *words, "--tp", 3, "--resume", says=("format version 1",))
    done = ok(*words, "--tp", 3, "--resume")
    assert "are there already, checked by digest" in done.err
    assert "were there already from an unfinished run" in done.out
    assert tree(out) == operation.expected


def test_without_resume_it_is_cleared_and_said(small: dict[str, Operation], fine: None, tmp_path: Path) -> None:
    half_done(small["split"], tmp_path / "out")
    done = ok("split", small["split"].source, tmp_path / "out", "--tp", 3)
    assert "cleared" in done.err
    assert "--resume would have gone on from it" in done.err
    shutil.rmtree(tmp_path / "out")
    done = ok("split", small["split"].source, tmp_path / "out", "--tp", 3, "--resume")
    assert "no unfinished run was found" in done.err


@pytest.mark.parametrize("ending", [OSError(28, "No space left on device"), Ended(signal.SIGTERM), MemoryError()])
def test_a_run_that_is_to_be_resumed_leaves_what_is_done(
    ending: BaseException, small: dict[str, Operation], fine: None, tmp_path: Path
) -> None:
    def fault(name: str, number: int, args: tuple[object, ...]) -> None:
        if number > 60 and name == "pwrite":
            raise ending

    operation, out = small["split"], tmp_path / "out"
    for resume in (False, True):
        with layered(Layer(fault=fault)):
            done = tpshard(*operation.words(out), *(["--resume"] if resume else []))
        assert done.status == (143 if isinstance(ending, Ended) else 5)
        assert "Traceback" not in done.err
        assert places(out)[1].exists() == resume
        if isinstance(ending, Ended):
            assert done.err.endswith("go on with --resume\n" if resume else "nothing was left at the output\n")
    assert operation(out, resume=True).bytes_kept > 0
    assert tree(out) == operation.expected


def test_a_journal_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    identity = Identity("1", "split", "p" * 64, "xxh3_128", (Stamped("/a\n\udcff", 1, 2, 3),))
    written = Journal(tmp_path / "journal")
    written.begin(identity)
    digest = "0123456789abcdef" * 2
    for number in range(5):
        written.record([number, 100 + number], [digest] * 2, [number], [digest])
    written.close()
    found = read_journal(tmp_path / "journal")
    assert found is not None
    assert found.identity == identity
    assert [list(entry.writes) for entry in found.entries] == [[n, 100 + n] for n in range(5)]
    assert found.entries[4].read_digests == [digest]
    for line in (tmp_path / "journal").read_bytes().splitlines():
        json.loads(line.rpartition(b" ")[0])
    more = Journal(tmp_path / "journal", found.chain, found.size)
    more.record([7], [digest], [], [])
    more.close()
    again = read_journal(tmp_path / "journal")
    assert again is not None
    assert len(again.entries) == 6


def test_a_journal_that_cannot_be_written_names_itself(small: dict[str, Operation], tmp_path: Path) -> None:
    def fault(name: str, number: int, args: tuple[object, ...]) -> None:
        if name == "ftruncate" and number < 12:
            raise OSError(5, "Input/output error")

    with layered(Layer(fault=fault)), pytest.raises(StorageError, match="journal: opening the journal failed"):
        small["split"](tmp_path / "out")
    assert not list(tmp_path.iterdir())
