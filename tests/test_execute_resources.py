"""What the byte mover takes: calls, memory, open files, modules."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from movement import Plan, check, run

from tpshard.errors import StorageError
from tpshard.execute import execute
from tpshard.routing import Copy, Route, Span, Strip

REPOSITORY = Path(__file__).resolve().parents[1]
TILES = [1, 5, 64, 700, 1 << 20]


# -- resources ---------------------------------------------------------------------------------


def test_the_umask_decides_the_mode(tmp_path):
    old = os.umask(0o027)
    try:
        plan = Plan(1, 4)
        plan.split(3, [10, 20, 30, 40])
        _, _, targets = run(plan, tmp_path)
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path, _ in targets} == {0o640}


def test_a_full_disk_is_found_before_anything_is_moved(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        plan = Plan(1, 2)
        plan.split(1, [2_000_000, 2_000_000])
        sources, targets = plan.write_sources(tmp_path)
        targets = [(small / path.name, nbytes) for path, nbytes in targets]
        with pytest.raises(StorageError, match=r"making it 2,000,024 bytes long failed: No space left.*free"):
            execute(plan.tasks, plan.reads, plan.writes, sources, targets)
        for path, _ in targets:
            path.unlink()
        check(plan, tmp_path)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_where_space_cannot_be_reserved(tmp_path, monkeypatch):
    monkeypatch.setattr("tpshard.openfiles._reserve", lambda fd, nbytes: False)
    plan = Plan(1, 2)
    plan.split(1, [2_000_000, 1_000_001])
    check(plan, tmp_path)


def test_few_open_files_are_enough(tmp_path):
    plan = Plan(300, 64)
    for file in range(300):
        source = plan.read(file, 64 * 5)
        targets = [plan.write(rank, 5) for rank in range(64)]
        route = Route(tuple(Copy(0, rank * 5, rank, 0, 5) for rank in range(64)))
        plan.task([Strip(1, (Span(source, 0, 320),), tuple(Span(t, 0, 5) for t in targets), route)])
    plan.merge(10, [7] * 300)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, hard))
    try:
        check(plan, tmp_path, threads=4, tile_bytes=500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


MEMORY_PROBE = """
import sys
from pathlib import Path
sys.path[:0] = [{repository!r}, {tests!r}]
from movement import Plan
from tpshard.execute import execute, hash_extents

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) // 1024

plan = Plan(8, 8)
plan.split(1, [9_000_000] * 8)
plan.split(3000, [3000] * 8)
plan.split(500_000, [2] * 8)
plan.merge(3000, [3000] * 8)
plan.collapse(9_000_000, 8)
folder = Path(sys.argv[1])
sources = []
for file, end in enumerate(plan.source_ends):
    path = folder / f"in-{{file}}"
    path.touch()
    import os; os.truncate(path, end)
    sources.append(path)
targets = [(folder / f"out-{{file}}", end) for file, end in enumerate(plan.target_ends)]
before, most = anonymous(), 0

import threading, time
ended = threading.Event()
def watch():
    global most
    while not ended.wait(0.002):
        most = max(most, anonymous())
watcher = threading.Thread(target=watch); watcher.start()
execute(plan.tasks, plan.reads, plan.writes, sources, targets, threads=4)
execute(plan.tasks, plan.reads, plan.writes, sources, targets, threads=4, compare=True)
hash_extents(plan.reads, sources, threads=4)
ended.set(); watcher.join()
print("numpy" in sys.modules, max(most, anonymous()) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded(tmp_path):
    probe = MEMORY_PROBE.format(repository=str(REPOSITORY), tests=str(REPOSITORY / "tests"))
    done = subprocess.run(
        [sys.executable, "-c", probe, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    used_numpy, grown = done.stdout.split()
    assert used_numpy == "True"
    assert int(grown) <= 64, f"{grown} MiB of anonymous memory"


def test_a_small_run_imports_nothing_heavy(tmp_path):
    probe = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from movement import Plan; from tpshard.execute import execute\n"
        "plan = Plan(1, 4); [plan.split(100, [64] * 4) for _ in range(20)]\n"
        "sources, targets = plan.write_sources(Path(sys.argv[1]))\n"
        "execute(plan.tasks, plan.reads, plan.writes, sources, targets)\n"
        "print(sorted({'numpy', 'torch', 'tqdm', 'transformers'} & set(sys.modules)))\n"
    )
    arguments = [str(tmp_path), str(REPOSITORY), str(REPOSITORY / "tests")]
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
