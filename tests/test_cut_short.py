"""Runs that are interrupted, raced, denied or deceived: nothing is left that looks whole, and what was there stays."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ELSEWHERE, ok, refused, started
from weights import tree

from tpshard import split


@pytest.fixture(scope="module")
def four(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("four") / "shards"
    split(llama, out, 4)
    return out


def interrupted(*words: object, partial: Path, number: signal.Signals) -> subprocess.Popen[str]:
    """Start a command, and send it a signal when it has begun to write."""
    running = started(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not list(partial.glob("output/model*")):
        assert running.poll() is None
        assert time.monotonic() < deadline
    running.send_signal(number)
    return running


def test_interrupt_leaves_nothing(large: Path, tmp_path: Path) -> None:
    running = interrupted(
        "split", large, tmp_path / "out", "--tp", 4, partial=tmp_path / "out.tpshard-partial", number=signal.SIGINT
    )
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err.strip() == "interrupted; nothing was left at the output"
    assert out == ""
    assert not list(tmp_path.iterdir())


def test_interrupt_leaves_the_old_output(large: Path, llama: Path, tmp_path: Path) -> None:
    ok("split", llama, tmp_path / "out", "--tp", 3)
    before = tree(tmp_path)
    running = interrupted(
        "split", large, tmp_path / "out", "--tp", 4, "--overwrite",
        partial=tmp_path / "out.tpshard-partial", number=signal.SIGINT,
    )  # fmt: skip
    running.communicate(timeout=60)
    assert running.returncode == 130
    assert tree(tmp_path) == before


def test_two_runs_to_one_output(large: Path, tmp_path: Path) -> None:
    words = ("split", large, tmp_path / "out", "--tp", 4)
    running = interrupted(*words, partial=tmp_path / "out.tpshard-partial", number=signal.SIGSTOP)
    try:
        refused(5, *words, says=("another run", str(running.pid)))
        assert (tmp_path / "out.tpshard-partial").exists()
    finally:
        running.send_signal(signal.SIGCONT)
    running.communicate(timeout=60)
    assert running.returncode == 0
    ok("verify", tmp_path / "out", "--level", "structure")


def test_source_that_changes_while_it_is_read(large: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in large.iterdir():
        shutil.copy(path, source)
    words = ("split", source, tmp_path / "out", "--tp", 4)
    for change in ("model.safetensors touched", "model.safetensors truncated", "config.json edited"):
        running = interrupted(*words, partial=tmp_path / "out.tpshard-partial", number=signal.SIGSTOP)
        name, _, how = change.partition(" ")
        shutil.copy(large / name, source)
        if how == "truncated":
            os.truncate(source / name, 10_000)
        elif how == "edited":
            (source / name).write_text((source / name).read_text() + " ")
        running.send_signal(signal.SIGCONT)
        err = running.communicate(timeout=60)[1]
        assert running.returncode == 4, err
        assert name in err
        assert "Traceback" not in err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
        shutil.copy(large / name, source)


# --- permissions -----------------------------------------------------------------------------------------------------

NOBODY = 65534


def as_nobody(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user who may do nothing that permissions forbid."""
    for above in (folder, *folder.parents):
        if not above.stat().st_mode & stat.S_IXOTH:
            above.chmod(above.stat().st_mode | stat.S_IXOTH | stat.S_IRGRP)
    # Everything is loaded beforehand: the user may not be able to read where Python keeps it.
    script = """
import fcntl, importlib, os, pkgutil, sys, xxhash, numpy, tpshard
for module in pkgutil.iter_modules(tpshard.__path__):
    if module.name != "__main__":
        importlib.import_module(f"tpshard.{module.name}")
tpshard.registry.families()
if os.getuid() == 0:
    os.setgroups([]); os.setgid(NOBODY); os.setuid(NOBODY)
tpshard.cli.main()
""".replace("NOBODY", str(NOBODY))
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(command, **ELSEWHERE, capture_output=True, timeout=60)


def test_no_permission(llama: Path, four: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, origin in (("source", llama), ("shards", four)):
        subprocess.run(["cp", "-r", origin, folder / name], check=True)
    (folder / "closed").mkdir(mode=0o555)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "shards" / "model-tp-02-of-04.safetensors").chmod(0)

    def denied(*words: object, name: str) -> None:
        done = as_nobody(*words, folder=folder)
        assert done.returncode == 5, done
        assert done.stderr.startswith("error: ")
        assert name in done.stderr
        assert "Traceback" not in done.stderr
        assert not list((folder / "open").iterdir())

    denied("split", folder / "source", folder / "closed" / "out", "--tp", 2, name="closed")
    denied("reshard", folder / "shards", folder / "open" / "out", "--tp", 2, name="model-tp-02-of-04")
    denied("verify", folder / "shards", name="model-tp-02-of-04")
    (folder / "shards" / "tpshard.json").chmod(0)
    denied("merge", folder / "shards", folder / "open" / "out", name="tpshard.json")
    (folder / "source" / "model.safetensors").chmod(0)
    denied("split", folder / "source", folder / "open" / "out", "--tp", 2, name="model.safetensors")
    (folder / "source").chmod(0)
    denied("split", folder / "source", folder / "open" / "out", "--tp", 2, name="source")
    (folder / "shards").chmod(0)
    denied("merge", folder / "shards", folder / "open" / "out", name="shards")
    (folder / "source").chmod(0o755)
    (folder / "shards").chmod(0o755)
