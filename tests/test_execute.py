"""The byte mover against the plain way of moving the same bytes."""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from movement import Plan, check, digests, moved, run

from tpshard.execute import execute, hash_extents
from tpshard.routing import Copy, Extent, Fill, Route, Same, Span, Strip, Task, Zero

REPOSITORY = Path(__file__).resolve().parents[1]
TILES = [1, 5, 64, 700, 1 << 20]


# -- random routes -----------------------------------------------------------------------------


def random_strip(plan, rnd, sources, targets):
    """A strip that covers its targets with copies, replicas and fills in any order, and its sources wholly."""
    rows = rnd.choice([1, 1, 1, 2, 3, 17, 60])
    widths = [rnd.randint(1, 40) for _ in range(sources)]
    unit = rnd.choice([1, 1, 2, 8])
    pieces, fills, zeros, same = [], [], [], []
    layout = [[] for _ in range(targets)]
    for source, width in enumerate(widths):
        at = 0
        while at < width * unit:
            length = min(rnd.randint(1, 12) * unit, width * unit - at)
            if rnd.random() < 0.1:
                zeros.append(Zero(source, at, length))
            else:
                for target in rnd.sample(range(targets), rnd.choice([1, 1, 1, targets])):
                    layout[target].append((source, at, length))
            at += length
    ends = []
    for target, parts in enumerate(layout):
        parts.extend([None] * rnd.choice([0, 0, 1]) or ([None] if not parts else []))
        rnd.shuffle(parts) if rnd.random() < 0.6 else None
        at = 0
        for part in parts:
            if part is None:
                length = rnd.randint(1, 30)
                fills.append(Fill(target, at, length))
            else:
                source, source_at, length = part
                pieces.append(Copy(source, source_at, target, at, length))
            at += length
        ends.append(at)
    replica = None
    if rnd.random() < 0.3:  # a second holder of source 0
        same = [Same(c.source, c.source_at, sources, c.source_at, c.length) for c in pieces if c.source == 0]
        same = sorted({(s.source_at, s): s for s in same}.values())
        replica = widths[0] * unit
    rnd.shuffle(pieces)
    spans = [(rows, width * unit) for width in widths] + ([(rows, replica)] if same and replica else [])
    return rows, spans, ends, Route(tuple(pieces), tuple(fills), tuple(same), tuple(zeros))


def random_plan(seed: int) -> Plan:
    rnd = random.Random(seed)
    plan = Plan(4, 3)
    for _ in range(rnd.randint(1, 6)):
        parts = [random_strip(plan, rnd, rnd.randint(1, 3), rnd.randint(1, 3)) for _ in range(rnd.choice([1, 1, 2]))]
        # the strips of a task lie one after the other in the same extents
        sizes_in, sizes_out = [0] * 4, [0] * 3
        for rows, spans, ends, _ in parts:
            for index, (_, width) in enumerate(spans):
                sizes_in[index] += rows * width
            for index, width in enumerate(ends):
                sizes_out[index] += rows * width
        reads = [plan.read(file, size) if size else -1 for file, size in enumerate(sizes_in)]
        writes = [plan.write(file, size) if size else -1 for file, size in enumerate(sizes_out)]
        at_in, at_out, strips = [0] * 4, [0] * 3, []
        for rows, spans, ends, route in parts:
            ins, outs = [], []
            for index, (_, width) in enumerate(spans):
                ins.append(Span(reads[index], at_in[index], width))
                at_in[index] += rows * width
            for index, width in enumerate(ends):
                outs.append(Span(writes[index], at_out[index], width))
                at_out[index] += rows * width
            strips.append(Strip(rows, tuple(ins), tuple(outs), route))
        plan.task(strips)
    return plan


def settle(plan: Plan, sources: list[Path]) -> None:
    """Make replicas equal and padding zero in the source files."""
    held = [bytearray(path.read_bytes()) for path in sources]
    for task in plan.tasks:
        for rows, ins, _, route in task.strips:
            for row in range(rows):

                def at(span: Span, column: int, row: int = row, task: Task = task) -> tuple[bytearray, int]:
                    extent = plan.reads[task.reads[span.extent]]
                    return held[extent.file], extent.offset + span.at + row * span.width + column

                for zero in route.zeros:
                    data, a = at(ins[zero.source], zero.source_at)
                    data[a : a + zero.length] = bytes(zero.length)
                for same in route.same:
                    data, a = at(ins[same.source], same.source_at)
                    other, b = at(ins[same.other], same.other_at)
                    other[b : b + same.length] = data[a : a + same.length]
    for path, data in zip(sources, held, strict=True):
        path.write_bytes(data)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(TILES), st.integers(1, 4), st.booleans())
def test_any_route_moves_as_the_plain_way(seed, tile, threads, load_numpy):
    if load_numpy:
        import numpy  # noqa: F401
    plan = random_plan(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources, targets = plan.write_sources(folder)
        settle(plan, sources)
        outcome = execute(plan.tasks, plan.reads, plan.writes, sources, targets, threads=threads, tile_bytes=tile)
        want, replicas, padding = moved(plan, sources)
        assert not replicas
        assert not padding
        assert [path.read_bytes() for path, _ in targets] == want
        assert outcome.write_digests == digests(plan.writes, want)
        truth = digests(plan.reads, [path.read_bytes() for path in sources])
        assert all(found in (None, right) for found, right in zip(outcome.read_digests, truth, strict=True))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_the_outcome_does_not_depend_on_threads_or_tiles(seed):
    plan = random_plan(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources, targets = plan.write_sources(folder)
        settle(plan, sources)
        execute(plan.tasks, plan.reads, plan.writes, sources, targets)
        rnd = random.Random(seed)
        for path in rnd.sample(sources, 2):  # damage: content, replicas and padding
            data = bytearray(path.read_bytes())
            for _ in range(5):
                data[rnd.randrange(len(data))] ^= 1 + rnd.randrange(255)
            path.write_bytes(data)
        _, replicas, padding = moved(plan, sources)
        outcomes = [
            execute(
                plan.tasks, plan.reads, plan.writes, sources, targets, compare=True, threads=threads, tile_bytes=tile
            )
            for threads, tile in ((1, 1 << 20), (1, 3), (3, 50), (2, 1), (4, 400))
        ]
    for outcome in outcomes[1:]:  # columns that no piece wants are read or skipped as the tile has it
        assert replace(outcome, bytes_read=0) == replace(outcomes[0], bytes_read=0)
    found = {(d.kind, d.offset) for d in outcomes[0].differences if d.kind != "content"}
    assert found == {("replica", at) for _, at in replicas} | {("padding", at) for _, at in padding}


# -- the shapes that occur ---------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("tile", [*TILES, None])
def test_shapes(tmp_path, tile, threads):
    plan = Plan(8, 8)
    plan.split(1, [100, 200, 50])
    plan.split(10, [3, 3, 3, 3])
    plan.merge(1, [10, 20, 30])
    plan.merge(300, [50] * 8)
    plan.split(300, [64] * 8)
    plan.replicate(77, 8)
    plan.collapse(0, 3)
    plan.fuse(2, 8, 40)
    plan.replicate(0, 8)
    outcome, sources = check(plan, tmp_path, threads=threads, tile_bytes=tile)
    truth = digests(plan.reads, [path.read_bytes() for path in sources])
    assert outcome.read_digests == truth
    assert hash_extents(plan.reads, sources, threads=threads, tile_bytes=tile) == truth


def test_large_tensors_use_every_path(tmp_path):
    plan = Plan(8, 8)
    plan.split(1, [300_000, 500_001, 700_007])  # column-parallel: stored straight from where it was read
    plan.split(2048, [96, 96, 96, 100])  # row-parallel: gathered
    plan.merge(2048, [96, 96, 96, 100])
    plan.split(70_000, [1, 2, 3, 2])  # rows too short to join
    plan.fuse(2, 4, 150_000)
    plan.replicate(400_000, 5)
    for tile in (1 << 16, 1 << 18, None):
        folder = tmp_path / str(tile)
        folder.mkdir()
        outcome, sources = check(plan, folder, tile_bytes=tile)
        assert outcome.read_digests == digests(plan.reads, [path.read_bytes() for path in sources])


def test_rows_are_joined_the_same_with_and_without_numpy(tmp_path, monkeypatch):
    plan = Plan(3, 3)
    plan.split(4000, [100, 50, 70])
    plan.merge(4000, [100, 50, 70])
    results = []
    for name, cost in (("with", 0.0), ("without", 1e9)):
        monkeypatch.setattr("tpshard.execute.NUMPY_COST", cost)
        (tmp_path / name).mkdir()
        sources, targets = plan.write_sources(tmp_path / name, random.Random(1).randbytes(5_000_000))
        outcome = execute(plan.tasks, plan.reads, plan.writes, sources, targets)
        results.append((outcome, [path.read_bytes() for path, _ in targets]))
    assert results[0] == results[1]


def test_fills_between_rows(tmp_path):
    plan = Plan(1, 1)
    source, target = plan.read(0, 900 * 400), plan.write(0, 900 * 500)
    route = Route((Copy(0, 0, 0, 30, 400),), (Fill(0, 0, 30), Fill(0, 430, 70)))
    plan.task([Strip(900, (Span(source, 0, 400),), (Span(target, 0, 500),), route)])
    for tile in (64, 1 << 16, 1 << 20):
        (tmp_path / str(tile)).mkdir()
        check(plan, tmp_path / str(tile), tile_bytes=tile)


def test_rows_that_several_ends_or_strips_fill(tmp_path):
    """Gates and ups of every expert in one tensor: neither may be stored as if the other's columns were its own."""
    rows, width = 900, 400
    halves = ((0, 250), (250, 150))
    plan = Plan(1, 2)
    whole, together = plan.read(0, rows * width), plan.write(0, rows * width)
    twice = Route(tuple(Copy(0, at, end, at, length) for end, (at, length) in enumerate(halves)))
    plan.task([Strip(rows, (Span(whole, 0, width),), (Span(together, 0, width),) * 2, twice)])
    apart, target = [plan.read(0, rows * length) for _, length in halves], plan.write(1, rows * width)
    plan.task([
        Strip(rows, (Span(source, 0, length),), (Span(target, 0, width),), Route((Copy(0, 0, 0, at, length),)))
        for source, (at, length) in zip(apart, halves, strict=True)
    ])  # fmt: skip
    for tile in (64, 1 << 16, 1 << 20):
        (tmp_path / str(tile)).mkdir()
        check(plan, tmp_path / str(tile), tile_bytes=tile)


def test_a_permutation_within_a_tensor_is_digested_all_the_same(tmp_path):
    plan = Plan(1, 1)
    size, parts = 100_000, 6
    source, target = plan.read(0, size * parts), plan.write(0, size * parts)
    copies = tuple(Copy(0, part * size, 0, (parts - 1 - part) * size, size) for part in range(parts))
    plan.task([Strip(1, (Span(source, 0, size * parts),), (Span(target, 0, size * parts),), Route(copies))])
    outcome, sources = check(plan, tmp_path, tile_bytes=70_000)
    assert outcome.read_digests == digests(plan.reads, [path.read_bytes() for path in sources])


def test_two_dimensional_cut(tmp_path):
    """Stacked experts cut by expert and by column: one strip a pair of experts and ranks."""
    plan = Plan(1, 4)
    experts, rows, width = 4, 30, 64
    source = plan.read(0, experts * rows * width)
    targets = [plan.write(rank, experts // 2 * rows * width // 2) for rank in range(4)]
    strips = []
    for expert in range(experts):
        pair = [targets[2 * (expert // 2)], targets[2 * (expert // 2) + 1]]
        at = (expert % 2) * rows * width // 2
        strips.append(
            Strip(
                rows,
                (Span(source, expert * rows * width, width),),
                tuple(Span(target, at, width // 2) for target in pair),
                Route((Copy(0, 0, 0, 0, width // 2), Copy(0, width // 2, 1, 0, width // 2))),
            )
        )
    plan.task(strips)
    for tile in (10, 500, None):
        (tmp_path / str(tile)).mkdir()
        check(plan, tmp_path / str(tile), tile_bytes=tile)


def test_an_extent_that_is_read_in_part_has_no_digest(tmp_path):
    for number, size in enumerate((100, 1 << 20)):
        plan = Plan(1, 1)
        source, target = plan.read(0, size), plan.write(0, size // 2)
        plan.task(
            [Strip(1, (Span(source, 0, size),), (Span(target, 0, size // 2),), Route((Copy(0, 9, 0, 0, size // 2),)))]
        )
        (tmp_path / str(number)).mkdir()
        outcome, _ = check(plan, tmp_path / str(number))
        assert outcome.read_digests == [None]


def test_no_digests(tmp_path):
    plan = Plan(1, 2)
    plan.split(5, [7, 7])
    outcome, _, _ = run(plan, tmp_path, algorithm=None)
    assert outcome.read_digests == [None]
    assert outcome.write_digests == [None, None]


def test_sha256(tmp_path):
    plan = Plan(1, 2)
    plan.split(5, [7, 7])
    plan.split(1, [700_000, 30])
    outcome, sources, targets = run(plan, tmp_path, algorithm="sha256")
    assert outcome.read_digests == digests(plan.reads, [path.read_bytes() for path in sources], "sha256")
    assert outcome.write_digests == digests(plan.writes, [path.read_bytes() for path, _ in targets], "sha256")


def test_nothing_to_do(tmp_path):
    outcome = execute([], [], [], [], [(tmp_path / "out", 10)])
    assert (tmp_path / "out").read_bytes() == bytes(10)
    assert (outcome.bytes_read, outcome.bytes_written) == (0, 0)


def test_few_calls_for_many_small_tensors(tmp_path, monkeypatch):
    plan = Plan(1, 8)
    for _ in range(1000):
        plan.split(4, [16] * 8)
    calls = {"read": 0, "write": 0}
    real_read, real_write = os.preadv, os.pwrite

    def read(*args):
        calls["read"] += 1
        return real_read(*args)

    def write(*args):
        calls["write"] += 1
        return real_write(*args)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwrite", write)
    run(plan, tmp_path)
    assert calls == {"read": 1, "write": 8}


def test_small_tensors_for_many_ranks_fill_the_buffer_on_the_way_out(tmp_path):
    plan = Plan(1, 64)
    for size in range(300):
        plan.replicate(900 + size, 64)
    check(plan, tmp_path)


@pytest.mark.parametrize("large", [False, True])
def test_every_byte_is_read_once_and_written_once(tmp_path, monkeypatch, large):
    plan = Plan(8, 8)
    plan.split(100, [3000 if large else 30] * 8)
    plan.merge(100, [3000 if large else 30] * 8)
    plan.collapse(400_000 if large else 40, 4)
    plan.replicate(400_000 if large else 40, 8)
    counts = {"read": 0, "write": 0}
    real_read, real_write = os.preadv, os.pwrite

    def read(fd, views, offset):
        counts["read"] += len(views[0])
        return real_read(fd, views, offset)

    def write(fd, data, offset):
        counts["write"] += len(data)
        return real_write(fd, data, offset)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwrite", write)
    sources, targets = plan.write_sources(tmp_path, bytes(6_000_000))
    outcome = execute(plan.tasks, plan.reads, plan.writes, sources, targets)
    assert counts["read"] == outcome.bytes_read == sum(extent.nbytes for extent in plan.reads)
    assert counts["write"] == outcome.bytes_written == sum(extent.nbytes for extent in plan.writes)


def test_progress_adds_up(tmp_path):
    plan = Plan(1, 2)
    plan.split(1, [3_000_000, 2_000_000])
    plan.split(4, [10, 10])
    seen = []
    outcome, sources, _ = run(plan, tmp_path, progress=seen.append)
    assert sum(seen) == outcome.bytes_written == 5_000_080
    hashed = []
    hash_extents(plan.reads, sources, progress=hashed.append)
    assert sum(hashed) == 5_000_080


def test_offsets_beyond_four_gib(tmp_path):
    """Sparse files: a tensor that begins beyond 4 GiB, and lands beyond 4 GiB."""
    far, size = (5 << 30) + 13, 300_001
    data = random.Random(2).randbytes(size)
    with (tmp_path / "in").open("wb") as file:
        file.seek(far)
        file.write(data)
    reads, writes = [Extent("w", 0, far, size)], [Extent("w", 0, far + 4096, size)]
    strip = Strip(1, (Span(0, 0, size),), (Span(0, 0, size),), Route((Copy(0, 0, 0, 0, size),)))
    task = Task("w", (strip,), (0,), (0,))
    out = tmp_path / "out"
    execute([task], reads, writes, [tmp_path / "in"], [(out, far + 4096 + size)])
    with out.open("rb") as file:
        file.seek(far + 4096)
        assert file.read() == data


@pytest.mark.slow
def test_a_tensor_of_more_than_four_gib(tmp_path):
    size = (4 << 30) + 12_345
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize < 2 * size:
        pytest.skip("needs 9 GB of disk")
    with (tmp_path / "in").open("wb") as file:
        file.truncate(size)
        file.seek((4 << 30) - 3)
        file.write(b"across")
    reads = [Extent("w", 0, 0, size)]
    writes = [Extent("w", 0, 0, size // 2), Extent("w", 1, 0, size - size // 2)]
    copies = (Copy(0, 0, 0, 0, size // 2), Copy(0, size // 2, 1, 0, size - size // 2))
    spans = (Span(0, 0, size // 2), Span(1, 0, size - size // 2))
    task = Task("w", (Strip(1, (Span(0, 0, size),), spans, Route(copies)),), (0,), (0, 1))
    execute([task], reads, writes, [tmp_path / "in"], [(tmp_path / "a", size // 2), (tmp_path / "b", size - size // 2)])
    with (tmp_path / "b").open("rb") as file:
        file.seek((4 << 30) - 3 - size // 2)
        assert file.read(6) == b"across"
