"""The byte mover where the bytes, the files or the device are not as they should be."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from movement import GAP, Plan, check, digests, run

from tpshard.errors import DamagedError, StorageError, UsageError
from tpshard.execute import execute, hash_extents
from tpshard.routing import Copy, Route, Span, Strip, Zero

REPOSITORY = Path(__file__).resolve().parents[1]
TILES = [1, 5, 64, 700, 1 << 20]


# -- what must be equal, zero, or as promised --------------------------------------------------


def replicated(nbytes):
    plan = Plan(3, 1)
    plan.collapse(nbytes, 3)
    return plan


@pytest.mark.parametrize("nbytes", [50, 700_000])
def test_replicas_that_differ(tmp_path, nbytes):
    plan = replicated(nbytes)
    sources, targets = plan.write_sources(tmp_path, bytes(nbytes + GAP))
    execute(plan.tasks, plan.reads, plan.writes, sources, targets)
    with sources[2].open("r+b") as file:
        file.seek(GAP + nbytes - 7)
        file.write(b"\x01")
    targets[0][0].unlink()
    with pytest.raises(DamagedError, match=rf"norm.weight.*in-0.bin and in-2.bin.*byte {nbytes - 7} of {nbytes}"):
        execute(plan.tasks, plan.reads, plan.writes, sources, targets)
    found = execute(plan.tasks, plan.reads, plan.writes, sources, targets, compare=True).differences
    assert found == [("norm.weight", "replica", "in-2.bin", "in-0.bin", nbytes - 7)]


@pytest.mark.parametrize(("rows", "width"), [(1, 60), (1, 800_000), (5, 30), (4000, 300)])
def test_padding_that_is_not_zero(tmp_path, rows, width):
    plan = Plan(1, 1)
    keep = width // 2
    source, target = plan.read(0, rows * width, "embed"), plan.write(0, rows * keep, "embed")
    route = Route((Copy(0, 0, 0, 0, keep),), zeros=(Zero(0, keep, width - keep),))
    plan.task([Strip(rows, (Span(source, 0, width),), (Span(target, 0, keep),), route)])
    sources, targets = plan.write_sources(tmp_path, bytes(rows * width + GAP))
    outcome = execute(plan.tasks, plan.reads, plan.writes, sources, targets)
    assert outcome.read_digests == digests(plan.reads, [sources[0].read_bytes()])
    offset = (rows - 1) * width + keep + 3
    with sources[0].open("r+b") as file:
        file.seek(GAP + offset)
        file.write(b"\x80")
    found = execute(plan.tasks, plan.reads, plan.writes, sources, targets, compare=True).differences
    assert found == [("embed", "padding", "in-0.bin", "", offset)]
    targets[0][0].unlink()
    with pytest.raises(DamagedError, match=f"embed: byte {offset} of {rows * width} in in-0.bin belongs to padding"):
        execute(plan.tasks, plan.reads, plan.writes, sources, targets)


@pytest.mark.parametrize("width", [10, 5000])
def test_content_that_differs_names_where_it_comes_from(tmp_path, width):
    plan = Plan(4, 1)
    plan.merge(100, [width] * 4)
    _, sources, targets = run(plan, tmp_path)
    offset = 77 * 4 * width + 2 * width + 1  # row 77, a column of source 2
    with targets[0][0].open("r+b") as file:
        file.seek(GAP + offset)
        byte = file.read(1)
        file.seek(GAP + offset)
        file.write(bytes([byte[0] ^ 4]))
    outcome = execute(plan.tasks, plan.reads, plan.writes, sources, targets, compare=True)
    assert outcome.differences == [("t0", "content", "out-0.bin", "in-2.bin", offset)]
    assert outcome.write_digests == digests(plan.writes, [targets[0][0].read_bytes()])


@pytest.mark.parametrize("width", [10, 300_000])
def test_a_digest_that_was_promised(tmp_path, width):
    plan = Plan(1, 2)
    plan.split(1, [width, width])
    sources, targets = plan.write_sources(tmp_path)
    right = digests(plan.reads, [sources[0].read_bytes()])[0]
    execute(plan.tasks, plan.reads, plan.writes, sources, targets, expected={0: right})
    wrong = "0" * 32
    found = execute(plan.tasks, plan.reads, plan.writes, sources, targets, expected={0: wrong}, compare=True)
    assert found.differences == [("t0", "digest", "in-0.bin", wrong, 0)]
    for path, _ in targets:
        path.unlink()
    with pytest.raises(DamagedError, match=f"t0.*in-0.bin.*{right}.*{wrong}"):
        execute(plan.tasks, plan.reads, plan.writes, sources, targets, expected={0: wrong})


# -- faults ------------------------------------------------------------------------------------


def faulty_plan():
    plan = Plan(2, 4)
    for _ in range(4):
        plan.split(200, [31, 33, 35, 37])
        plan.split(1, [100_000, 200_000, 3, 77_777])
        plan.merge(200, [301, 307])
    return plan


def test_short_reads_and_writes_and_interruptions(tmp_path, monkeypatch):
    rnd = random.Random(3)
    real_read, real_write = os.preadv, os.pwrite

    def read(fd, views, offset):
        if rnd.random() < 0.3:
            raise InterruptedError(errno.EINTR, "interrupted")
        return real_read(fd, [views[0][: rnd.randint(1, len(views[0]))]], offset)

    def write(fd, data, offset):
        if rnd.random() < 0.3:
            raise InterruptedError(errno.EINTR, "interrupted")
        return real_write(fd, data[: rnd.randint(1, len(data))], offset)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwrite", write)
    check(faulty_plan(), tmp_path, tile_bytes=50_000)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("pwrite", errno.ENOSPC, r"out-\d.bin: writing [0-9,]+ bytes at byte [0-9,]+ failed: No space.*are free"),
        ("pwrite", errno.EDQUOT, r"out-\d.bin.*free"),
        ("pwrite", errno.EIO, r"out-\d.bin: writing.*Input/output error.*Check the device"),
        ("preadv", errno.EIO, r"in-\d.bin: reading at byte [0-9,]+ failed: Input/output error"),
        ("preadv", errno.ESTALE, r"in-\d.bin"),
    ],
)
def test_device_errors(tmp_path, monkeypatch, threads, call, code, text):
    real, calls = getattr(os, call), iter(range(10**6))

    def fail(*args):
        if next(calls) >= 5:
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(os, call, fail)
    before = threading.active_count()
    with pytest.raises(StorageError, match=text):
        run(faulty_plan(), tmp_path, threads=threads, tile_bytes=50_000)
    assert threading.active_count() == before


def test_a_source_that_shrank(tmp_path):
    plan = faulty_plan()
    sources, targets = plan.write_sources(tmp_path)
    os.truncate(sources[1], 100)
    with pytest.raises(DamagedError, match=r"in-1.bin: the file has 100 bytes by now, and bytes [0-9,]+ to .*shrank"):
        execute(plan.tasks, plan.reads, plan.writes, sources, targets)
    with pytest.raises(DamagedError, match="shrank"):
        hash_extents(plan.reads, sources)


def test_a_missing_source_and_a_target_that_exists(tmp_path):
    plan = faulty_plan()
    sources, targets = plan.write_sources(tmp_path)
    sources[0].unlink()
    with pytest.raises(StorageError, match=r"in-0.bin: opening it failed"):
        execute(plan.tasks, plan.reads, plan.writes, sources, targets)
    with pytest.raises(StorageError, match=r"out-0.bin: creating it failed: File exists"):
        execute(plan.tasks, plan.reads, plan.writes, sources, targets)


@pytest.mark.parametrize(
    "settings_", [{"threads": 0}, {"threads": -1}, {"tile_bytes": 0}, {"algorithm": "md5"}], ids=str
)
def test_impossible_settings(tmp_path, settings_):
    with pytest.raises(UsageError):
        run(faulty_plan(), tmp_path, **settings_)


def test_an_error_in_progress_stops_the_work(tmp_path):
    plan = faulty_plan()

    def stop(moved_bytes):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        run(plan, tmp_path, progress=stop, tile_bytes=200)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tpshard-")]


@pytest.mark.parametrize("threads", [1, 3])
def test_ctrl_c(tmp_path, monkeypatch, threads):
    plan = Plan(1, 1)
    for _ in range(200):
        plan.replicate(400_000, 1)
    real = os.pwrite

    def slow(*args):
        time.sleep(0.02)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path, threads=threads)
    assert time.monotonic() - begin < 1.5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tpshard-")]
