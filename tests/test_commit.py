"""An output appears whole or not at all, and nothing that matters is ever overwritten."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpshard import publish, stagefolder
from tpshard.commit import Staging
from tpshard.errors import StorageError, UsageError
from tpshard.filecopy import copy_side_file
from tpshard.outputplace import _bytes_held, check_output, check_separate, partial_path

REPOSITORY = Path(__file__).resolve().parents[1]


def fill(folder: Path, text: str) -> None:
    (folder / "model.safetensors").write_text(text)
    (folder / "sub").mkdir()
    (folder / "sub" / "extra.json").write_text(text)
    (folder / "tpshard.json").write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


NEW = {"model.safetensors": "new", "sub/extra.json": "new", "tpshard.json": "new"}
OLD = {"model.safetensors": "old", "sub/extra.json": "old", "tpshard.json": "old", "left": "over"}


def old_output(out: Path) -> None:
    out.mkdir()
    fill(out, "old")
    (out / "left").write_text("over")


# -- publishing --------------------------------------------------------------------------------


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("existing", [None, "empty"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_everything_appears_at_once(tmp_path, existing, overwrite, fsync):
    out = tmp_path / "out"
    if existing:
        out.mkdir()
    with Staging(out, overwrite=overwrite, needed_bytes=10, fsync=fsync) as staging:
        assert staging.path.parent.parent == out.parent
        fill(staging.path, "new")
        assert not out.exists() or not list(out.iterdir())
        staging.publish()
        assert content(out) == NEW
    assert os.listdir(tmp_path) == ["out"]
    assert content(out) == NEW


@pytest.mark.parametrize("exchange", [True, False])
def test_an_old_output_is_replaced_whole(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(publish, "exchange", lambda one, two: False)
    out = tmp_path / "out"
    old_output(out)
    with Staging(out, overwrite=True, needed_bytes=10) as staging:
        fill(staging.path, "new")
        assert content(out) == OLD
        staging.publish()
    assert content(out) == NEW
    assert os.listdir(tmp_path) == ["out"]


def test_without_publish_nothing_is_left(tmp_path):
    out = tmp_path / "out"
    with Staging(out, overwrite=False, needed_bytes=0) as staging:
        fill(staging.path, "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("problem", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_leaves_the_old_output_as_it_was(tmp_path, problem):
    out = tmp_path / "out"
    old_output(out)
    with pytest.raises(type(problem)), Staging(out, overwrite=True, needed_bytes=0) as staging:
        fill(staging.path, "new")
        (staging.path / "sub").chmod(0o500)
        raise problem
    assert content(out) == OLD
    assert os.listdir(tmp_path) == ["out"]


def test_a_failing_rename_puts_the_old_output_back(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "exchange", lambda one, two: False)
    real = os.rename

    def rename(one, two):
        if str(one).endswith(".tpshard-partial/output"):
            raise OSError(errno.EIO, "Input/output error")
        real(one, two)

    monkeypatch.setattr(os, "rename", rename)
    out = tmp_path / "out"
    old_output(out)
    with (
        pytest.raises(StorageError, match=r"out: renaming out\.tpshard-partial to it failed"),
        Staging(out, overwrite=True, needed_bytes=0) as staging,
    ):
        fill(staging.path, "new")
        staging.publish()
    assert content(out) == OLD
    assert os.listdir(tmp_path) == ["out"]


def test_an_output_that_someone_else_made_meanwhile_is_kept(tmp_path):
    out = tmp_path / "out"
    with (
        pytest.raises(StorageError, match="something else was put there meanwhile"),
        Staging(out, overwrite=False, needed_bytes=0) as staging,
    ):
        fill(staging.path, "new")
        out.mkdir()
        (out / "theirs").write_text("x")
        staging.publish()
    assert content(out) == {"theirs": "x"}
    assert os.listdir(tmp_path) == ["out"]


def test_modes_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        with Staging(tmp_path / "out", overwrite=False, needed_bytes=0) as staging:
            staging.publish()
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_a_linked_parent_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with Staging(tmp_path / "link" / "out", overwrite=False, needed_bytes=0) as staging:
        fill(staging.path, "new")
        staging.publish()
    assert content(tmp_path / "real" / "out") == NEW


# -- refusing ----------------------------------------------------------------------------------


def test_an_output_that_is_taken(tmp_path):
    out = tmp_path / "out"
    old_output(out)
    with pytest.raises(UsageError, match=r"out: exists and isn't empty.*--overwrite"):
        check_output(out, overwrite=False, needed_bytes=0)
    (tmp_path / "file").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="file: is a file"):
            check_output(tmp_path / "file", overwrite=overwrite, needed_bytes=0)
    assert content(out) == OLD


def test_a_missing_parent(tmp_path):
    with pytest.raises(StorageError, match=r"parent directory .*no doesn't exist.*mkdir -p"):
        check_output(tmp_path / "no" / "out", overwrite=False, needed_bytes=0)


def test_directories_that_are_never_replaced(tmp_path, monkeypatch):
    work = tmp_path / "a" / "b"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    (tmp_path / "home" / "me").mkdir(parents=True)
    for path, text in [
        (Path(), "current directory"),
        (work, "current directory"),
        (tmp_path / "a", "current directory"),
        (tmp_path / "home" / "me", "home directory"),
        (tmp_path / "home", "home directory"),
        (Path("/"), "root directory"),
    ]:
        with pytest.raises(UsageError, match=text):
            check_output(path, overwrite=True, needed_bytes=0)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no mount point is known here")
def test_a_mount_point():
    with pytest.raises(UsageError, match=r"mount point.*inside it"):
        check_output(Path("/proc"), overwrite=True, needed_bytes=0)


def test_a_directory_that_is_not_writable(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="isn't writable"):
        check_output(tmp_path / "out", overwrite=False, needed_bytes=0)


def test_a_directory_that_the_system_says_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StorageError, match="isn't writable"):
        check_output(tmp_path / "out", overwrite=False, needed_bytes=0)


def test_too_little_space(tmp_path):
    with (
        pytest.raises(StorageError, match=r"1,152,921,504,606,846,976 bytes are needed and [0-9,]+ are free"),
        Staging(tmp_path / "out", overwrite=False, needed_bytes=1 << 60),
    ):
        pass
    assert os.listdir(tmp_path) == []


def test_a_small_file_system(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150k", "tmpfs", str(small)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with (
            pytest.raises(StorageError, match="329,000 bytes are needed"),
            Staging(small / "out", overwrite=False, needed_bytes=329_000),
        ):
            pass
        source = tmp_path / "big"
        source.write_bytes(bytes(300_000))
        with (
            pytest.raises(StorageError, match=r"side: writing at byte [0-9,]+ failed: No space left"),
            Staging(small / "out", overwrite=False, needed_bytes=0) as staging,
        ):
            copy_side_file(source, staging.path / "side")
        assert os.listdir(small) == []
        with pytest.raises(UsageError, match="mount point"):
            check_output(small, overwrite=True, needed_bytes=0)
    finally:
        subprocess.run(["umount", str(small)], check=True)


# -- source and output apart -------------------------------------------------------------------


def test_source_and_output_must_be_apart(tmp_path):
    source = tmp_path / "src"
    (source / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path)
    for out in (source, tmp_path / "link", tmp_path / "x" / ".." / "src"):
        with pytest.raises(UsageError, match="is the source itself"):
            check_separate(source, out)
    for out in (source / "out", source / "deep" / "out", tmp_path / "link" / "out", tmp_path / "up" / "src" / "o"):
        with pytest.raises(UsageError, match="lies inside the source"):
            check_separate(source, out)
    for out in (tmp_path, tmp_path / "up"):
        with pytest.raises(UsageError, match="holds the source"):
            check_separate(source, out)
    with pytest.raises(UsageError, match="holds the source"):
        check_separate(tmp_path / "link" / "deep", source)
    check_separate(source, tmp_path / "src2")
    check_separate(source, tmp_path / "new" / "out")


def test_the_partial_directory_is_no_source(tmp_path):
    partial = partial_path(tmp_path / "out")
    partial.mkdir()
    with pytest.raises(UsageError, match="partial directory is the source itself"):
        check_separate(partial, tmp_path / "out")


# -- what another run left or holds ------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {repository!r})
from tpshard.commit import Staging
with Staging(Path(sys.argv[1]), overwrite=True, needed_bytes=0) as staging:
    (staging.path / "model-tp-00-of-02.safetensors").write_bytes(bytes(1000))
    (staging.path / "sub").mkdir()
    (staging.path / "sub" / "x").write_text("x")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other_run(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(repository=str(REPOSITORY)), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_run_that_is_alive_is_left_alone(tmp_path, other_run):
    with (
        pytest.raises(StorageError, match=rf"another run.*process {other_run.pid}\b"),
        Staging(tmp_path / "out", overwrite=True, needed_bytes=0),
    ):
        pass
    assert (partial_path(tmp_path / "out") / "output" / "sub" / "x").exists()


def test_a_run_that_was_killed_is_cleared(tmp_path, other_run):
    out = tmp_path / "out"
    old_output(out)
    other_run.send_signal(signal.SIGKILL)
    other_run.wait()
    assert content(out) == OLD
    partial = partial_path(out)
    assert partial.exists()
    assert not (partial / "tpshard.json").exists()
    notes = []
    with Staging(out, overwrite=True, needed_bytes=0, note=notes.append) as staging:
        assert os.listdir(staging.path) == []
        fill(staging.path, "new")
        staging.publish()
    assert content(out) == NEW
    assert os.listdir(tmp_path) == ["out"]
    assert notes == [f"{partial}: cleared; process {other_run.pid} left it unfinished"]


def test_ctrl_c_clears_its_own(tmp_path, other_run):
    other_run.send_signal(signal.SIGINT)
    other_run.wait()
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_not_ours_is_not_cleared(tmp_path):
    partial = partial_path(tmp_path / "out")
    partial.mkdir()
    (partial / "thesis.tex").write_text("x")
    with (
        pytest.raises(StorageError, match="doesn't say that tpshard made it"),
        Staging(tmp_path / "out", overwrite=True, needed_bytes=0),
    ):
        pass
    assert content(partial) == {"thesis.tex": "x"}


def test_a_file_or_link_in_the_way(tmp_path):
    partial_path(tmp_path / "out").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    partial_path(tmp_path / "out2").symlink_to(tmp_path / "elsewhere")
    for name in ("out", "out2"):
        with (
            pytest.raises(StorageError, match="is in the way"),
            Staging(tmp_path / name, overwrite=True, needed_bytes=0),
        ):
            pass


def test_without_locks_it_goes_by_process_number(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    out = tmp_path / "out"
    notes = []
    with Staging(out, overwrite=False, needed_bytes=0, note=notes.append):
        assert "cannot be locked" in notes[0]
        with (
            pytest.raises(StorageError, match=rf"process {os.getpid()} is making it"),
            Staging(out, overwrite=False, needed_bytes=0),
        ):
            pass
    partial = partial_path(out)
    partial.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (partial / stagefolder.MARK).write_text(f"{ended.pid} {socket.gethostname()}\n")
    with Staging(out, overwrite=False, needed_bytes=0) as staging:
        staging.publish()
    shutil.rmtree(out)
    partial.mkdir()
    (partial / stagefolder.MARK).write_text("1234 another-host\n")
    with (
        pytest.raises(StorageError, match="process 1234 on another-host"),
        Staging(out, overwrite=False, needed_bytes=0),
    ):
        pass


def test_space_that_a_dead_run_holds_counts_as_free(tmp_path):
    partial = partial_path(tmp_path / "out")
    partial.mkdir()
    (partial / "big").write_bytes(b"x" * 3_000_000)
    assert _bytes_held(partial) >= 3_000_000


MOVING = """
import os, sys
from pathlib import Path
sys.path[:0] = [{repository!r}, {tests!r}]
from movement import Plan
from tpshard.commit import Staging
from tpshard.execute import execute
plan = Plan(1, 2)
for _ in range(100):
    plan.split(1, [300_000, 300_000])
folder = Path(sys.argv[1])
sources, _ = plan.write_sources(folder, bytes(70_000_000))
print("ready", flush=True)
with Staging(folder / "out", overwrite=True, needed_bytes=60_000_000) as staging:
    execute(plan.tasks, plan.reads, plan.writes, sources,
            [(staging.path / f"rank-{{n}}", end) for n, end in enumerate(plan.target_ends)])
    (staging.path / "tpshard.json").write_text("whole")
    staging.publish()
print("done", flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.06, 0.1])
def test_killed_at_any_moment_the_output_is_whole_or_absent(tmp_path, delay):
    source = MOVING.format(repository=str(REPOSITORY), tests=str(REPOSITORY / "tests"))
    child = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(delay)
    child.kill()
    child.wait()
    child.stdout.close()
    out = tmp_path / "out"
    if out.exists():
        assert (out / "tpshard.json").read_text() == "whole"
        assert {path.name for path in out.iterdir()} == {"rank-0", "rank-1", "tpshard.json"}
    done = subprocess.run([sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ready", "done"]
    assert not partial_path(out).exists()
