"""Signals: none gives a traceback, whenever it comes, and what was begun is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ELSEWHERE, ok, tpshard
from weights import tree

from tpshard.signals import Ended

ENTRY = (sys.executable, "-m", "tpshard")
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def begun(words: list[object], partial: Path) -> subprocess.Popen[str]:
    """The program once it has begun to write."""
    running = subprocess.Popen(
        [*ENTRY, *map(str, words)], **ELSEWHERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not list(partial.glob("output/model*")):
        assert running.poll() is None
        assert time.monotonic() < deadline
    return running


@pytest.mark.parametrize("number", STATUS)
def test_a_signal_cleans_up(number: signal.Signals, large: Path, tmp_path: Path) -> None:
    running = begun(["split", large, tmp_path / "out", "--tp", 4], tmp_path / "out.tpshard-partial")
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == STATUS[number]
    name = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (out, err.strip()) == ("", f"{name}; nothing was left at the output")
    assert not list(tmp_path.iterdir())


def test_more_signals_do_not_disturb_the_cleaning_up(large: Path, tmp_path: Path) -> None:
    running = begun(["split", large, tmp_path / "out", "--tp", 4], tmp_path / "out.tpshard-partial")
    for number in (*STATUS, *STATUS):
        running.send_signal(number)
    assert "Traceback" not in running.communicate(timeout=60)[1]
    assert running.returncode in STATUS.values()
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_at_the_start_stays_ignored(large: Path, tmp_path: Path) -> None:
    """``nohup tpshard ...``: the terminal may go."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    words = [*ENTRY, "split", str(large), str(tmp_path / "out"), "--tp", "2"]
    running = subprocess.Popen(words, **ELSEWHERE, stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=ignore)
    while not (tmp_path / "out.tpshard-partial").exists() and running.poll() is None:
        time.sleep(0.001)
    running.send_signal(signal.SIGHUP)
    running.communicate(timeout=60)
    assert running.returncode == 0
    assert "tpshard.json" in tree(tmp_path / "out")


@pytest.mark.parametrize("number", STATUS)
def test_a_signal_while_the_program_is_loaded(number: signal.Signals) -> None:
    """At every import of its own from the first handler on, which is set before anything else is loaded."""
    script = f"""
import builtins, os, sys
import tpshard.__main__ as program
real, count = builtins.__import__, [0]
at = int(sys.argv.pop())
sys.argv.append("--version")
def load(name, *rest, **more):
    if name.split(".")[0] in ("click", "cli", "cliparts", "dataclasses"):
        count[0] += 1
        if count[0] == at:
            os.kill(os.getpid(), {int(number)})
    return real(name, *rest, **more)
builtins.__import__ = load
program.main()
"""
    for at in (1, 2, 4):
        done = subprocess.run([sys.executable, "-c", script, str(at)], **ELSEWHERE, capture_output=True, timeout=60)
        assert done.returncode == STATUS[number], done
        assert done.stderr == "interrupted; nothing was begun\n"
        assert done.stdout == ""


def test_ctrl_c_in_the_first_moments(llama: Path, tmp_path: Path) -> None:
    """Whenever it comes there is no traceback of tpshard; Python's own start before it is not ours to guard."""
    for step in range(12):
        running = subprocess.Popen(
            [*ENTRY, "split", str(llama), str(tmp_path / "out"), "--tp", "2", "--dry-run"],
            **ELSEWHERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        time.sleep(0.02 + 0.01 * step)
        running.send_signal(signal.SIGINT)
        err = running.communicate(timeout=60)[1]
        assert running.returncode in (0, 130, 1, -signal.SIGINT)
        assert os.path.join("tpshard", "cli") not in err
        assert "click" not in err
    assert not list(tmp_path.iterdir())


def test_only_what_writes_speaks_of_its_output(large: Path, tmp_path: Path) -> None:
    ok("split", large, tmp_path / "out", "--tp", 2)
    told = {}
    for words in (["verify", str(tmp_path / "out")], ["split", str(large), str(tmp_path / "new"), "--tp", "2"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tpshard.options.Options.running", _ended)
            done = tpshard(*words)
        told[words[0]] = (done.status, done.err.strip())
    assert told == {
        "verify": (143, "ended by SIGTERM"),
        "split": (143, "ended by SIGTERM; nothing was left at the output"),
    }


def _ended(*arguments: object) -> None:
    raise Ended(signal.SIGTERM)
