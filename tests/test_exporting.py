"""The core of engine layouts: strands, ranks, forms, and what an arrangement proves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpshard.axes import Heads, Units, replicated
from tpshard.errors import UnsupportedError, UsageError
from tpshard.exporting.forms import _chunk, _paired, _sliced
from tpshard.exporting.grid import Grid, equal_stages, given_stages, left_over_first, left_over_last
from tpshard.exporting.strands import strands_of
from tpshard.intervals import Run, total

HEADS = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))  # KV heads, queries a group, size


def indices(runs: tuple[Run, ...]) -> list[int]:
    return [at for run in runs for at in range(run.start, run.start + run.length)]


@given(HEADS)
def test_blocks_and_groups_have_the_same_strands(shape: tuple[int, int, int]) -> None:
    """Unit by unit, q, k and v are the same rows of ``[Q; K; V]`` and of ``[q .. q k v]`` of every group."""
    kv, group, size = shape
    heads = Heads("heads", kv * group, kv)
    blocks = strands_of(heads.query(size) + heads.kv(size) + heads.kv(size))
    groups = strands_of(heads.grouped(size, size, size))
    assert [strand.units for strand in blocks] == [strand.units for strand in groups] == [kv * group, kv, kv]
    rows = [(g, at) for g in range(kv) for at in range((group + 2) * size)]
    for unit in range(kv * group):
        found = indices(groups[0].runs(unit, unit + 1))
        assert [rows[at] for at in found] == [(unit // group, unit % group * size + n) for n in range(size)]
    for number, strand in enumerate(groups[1:]):
        for unit in range(kv):
            assert [rows[at] for at in indices(strand.runs(unit, unit + 1))] == [
                (unit, (group + number) * size + n) for n in range(size)
            ]


@given(HEADS, st.integers(0, 3))
def test_strands_hold_every_index_once(shape: tuple[int, int, int], beside: int) -> None:
    kv, group, size = shape
    heads, ffn = Heads("heads", kv * group, kv), Units("ffn", kv * 7)
    for dim in (heads.grouped(size, size), heads.query(size), ffn.each(size) * 2, ffn.each() + replicated(beside + 1)):
        found = sorted(at for strand in strands_of(dim) for at in indices(strand.all))
        assert found == list(range(dim.extent))


def test_a_run_of_units_goes_on_where_the_one_before_ended() -> None:
    ffn = Units("ffn", 8)
    dim = ffn.run(0, 4) + ffn.run(4, 8) + ffn.run(0, 8)
    first, second = strands_of(dim)
    assert indices(first.runs(2, 6)) == [2, 3, 4, 5]
    assert indices(second.runs(2, 6)) == [10, 11, 12, 13]


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_hold_every_layer_once_in_order(layers: int, pp: int) -> None:
    for rule in (left_over_first, left_over_last, equal_stages):
        try:
            bounds = rule(layers, pp)
        except UnsupportedError:
            assert rule is equal_stages
            assert layers % pp
            continue
        assert [n for start, stop in bounds for n in range(start, stop)] == list(range(layers))
        assert len(bounds) == pp
    sizes = [stop - start for start, stop in left_over_last(layers, pp)]
    assert sizes == sorted(sizes)


def test_stages_by_hand() -> None:
    assert given_stages("3,1,1", 5) == ((0, 3), (3, 4), (4, 5))
    for text in ("3,1", "5,0", "a,b", "", "6,-1"):
        with pytest.raises(UsageError, match="--stages"):
            given_stages(text, 5)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_every_expert_has_its_ranks(experts: int, tp: int, pp: int, inside: bool) -> None:
    grid = Grid(tp, left_over_first(16, pp), tp if inside else 3, inside)
    held = grid.experts(experts)
    assert len(held) == len(grid.ranks) == (tp * pp if inside else 3 * tp * pp)
    for stage in range(pp):
        of_stage = [bounds for bounds, rank in zip(held, grid.ranks, strict=True) if rank.pp == stage]
        every = [expert for start, stop in of_stage for expert in range(start, stop)]
        assert sorted(every) == sorted(list(range(experts)) * (1 if inside or grid.ep_size == 1 else tp))


def test_whole_experts_are_for_all_ranks_or_none() -> None:
    with pytest.raises(UsageError, match=r"it is 1 .* or 4"):
        Grid(4, ((0, 2),), 2, True)


@settings(deadline=None)  # the first call imports torch
@given(st.integers(0, 60), st.integers(1, 9))
def test_chunks_are_those_of_torch(extent: int, tp: int) -> None:
    import torch

    chunks = [list(chunk) for chunk in torch.arange(extent).chunk(tp)] if extent else []
    mine = [indices(_chunk(extent, rank, tp, True)) for rank in range(tp)]
    assert [chunk for chunk in mine if chunk] == [[int(at) for at in chunk] for chunk in chunks]


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 6))
def test_halves_of_a_head_are_paired(heads: int, half: int) -> None:
    """``w.view(n, 2, d // 2).transpose(1, 2)``, head by head."""
    import torch

    rows = torch.arange(heads * 2 * half)
    wanted = rows.view(heads, 2, half).transpose(1, 2).reshape(-1).tolist()
    assert indices(_paired((Run(0, heads * 2 * half),), 2 * half)) == wanted


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_a_slice_of_runs(pairs: list[tuple[int, int]], low: int, high: int) -> None:
    runs = tuple(Run(start, length) for start, length in pairs)
    assert indices(_sliced(runs, low, high)) == indices(runs)[low:high]
    assert total(_sliced(runs, 0, total(runs))) == total(runs)
