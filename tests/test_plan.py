"""Every layout to every layout: plans carried out on small tensors, index by index as the layouts say."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import planned
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import BYTES, MOST, experts, ffn, fused_layout, gqa, grid_layout, h

from tpshard.axes import Dim, replicated
from tpshard.errors import LayoutError, UnsupportedError
from tpshard.execute import execute
from tpshard.intervals import Run, clipped, joined
from tpshard.layout import Cut, Layout, Piece, Stored, cut, cut_dims, held_by, whole_cut, whole_layout
from tpshard.matching import Logical
from tpshard.partition import Partition, interned
from tpshard.place import place_native
from tpshard.planning import Plan, build_plan, sizes_of, stored_bytes


def carry(source: Layout, target: Layout, values: planned.Values) -> Plan:
    """Plan, carry out and compare with what the target layout says, index by index."""
    here, data = planned.placed(source, values)
    there, expected = planned.placed(target, values)
    plan = build_plan(here, there)
    for made, wanted in zip(planned.executed(plan, data), expected, strict=True):
        np.testing.assert_array_equal(made, wanted)
    return plan


@pytest.fixture(scope="module")
def natives() -> dict[int, Layout]:
    return {tp_size: planned.native(BYTES, tp_size) for tp_size in range(1, MOST + 1)}


@pytest.fixture(scope="module")
def values(natives: dict[int, Layout]) -> planned.Values:
    return planned.random_values(natives[1].tensors.values())


@pytest.mark.parametrize("tp_size", range(1, MOST + 1))
def test_reshard_from_every_degree_is_a_direct_split(
    tp_size: int, natives: dict[int, Layout], values: planned.Values
) -> None:
    for target in natives.values():
        plan = carry(natives[tp_size], target, values)
        assert len(plan.reads) == sum(n is not None for row in plan.source.extents for n in row)
        assert len(plan.writes) == sum(n is not None for row in plan.target.extents for n in row)


@pytest.mark.parametrize("tp_size", range(1, MOST + 1))
def test_split_and_merge(tp_size: int, natives: dict[int, Layout], values: planned.Values) -> None:
    whole = whole_layout(natives[1].tensors.values())
    carry(whole, natives[tp_size], values)
    carry(natives[tp_size], whole, values)


def test_replicas_and_padding_are_checked(natives: dict[int, Layout], values: planned.Values) -> None:
    """A changed byte anywhere in the source either reaches the target or is found out."""
    whole = whole_layout(natives[1].tensors.values())
    here, data = planned.placed(natives[5], values)
    there, expected = planned.placed(whole, values)
    plan = build_plan(here, there)
    random = np.random.default_rng(1)
    for extent in plan.reads:
        for at in random.integers(0, extent.nbytes, min(extent.nbytes, 3)):
            changed = [file.copy() for file in data]
            changed[extent.file][extent.offset + at] ^= 0x55
            try:
                made = planned.executed(plan, changed)
            except planned.Differs:
                continue
            assert any(not np.array_equal(a, b) for a, b in zip(made, expected, strict=True)), extent


def test_the_product_executes_as_the_plain_executor_does(
    tmp_path: Path, natives: dict[int, Layout], values: planned.Values
) -> None:
    whole = whole_layout(natives[1].tensors.values())
    for number, (a, b) in enumerate([(1, 8), (8, 3), (3, 1)]):
        source, target = (whole if a == 1 else natives[a]), (whole if b == 1 else natives[b])
        here, data = planned.placed(source, values)
        there, expected = planned.placed(target, values)
        plan = build_plan(here, there)
        paths = [tmp_path / f"in-{number}-{file.name}" for file in here.files]
        outs = [(tmp_path / f"out-{number}-{file.name}", file.size) for file in there.files]
        for path, held in zip(paths, data, strict=True):
            path.write_bytes(held.tobytes())
        execute(plan.tasks, plan.reads, plan.writes, paths, outs, tile_bytes=100)
        for (path, _), file, wanted in zip(outs, there.files, expected, strict=True):
            made = np.frombuffer(path.read_bytes(), np.uint8)
            for extent in plan.writes:
                if there.files[extent.file] == file:
                    part = slice(extent.offset, extent.offset + extent.nbytes)
                    np.testing.assert_array_equal(made[part], wanted[part], extent.tensor)


# -- sub-byte dtypes -----------------------------------------------------------------------------------------


def packed_plan(dtype: str, dims: tuple[Dim, ...], source: int, target: int) -> Plan:
    """4 and 6 bits an element cannot be enumerated as bytes: their plans are compared with those of the bytes."""
    layouts = [planned.native({"t": (dtype, dims)}, tp_size) for tp_size in (source, target)]
    found = []
    for layout in layouts:
        found.append(place_native(layout).placed)
    return build_plan(*found)


@pytest.mark.parametrize(("a", "b"), [*itertools.product(range(1, 6), repeat=2)])
def test_sub_byte_cuts_on_whole_bytes(a: int, b: int) -> None:
    for dtype, per_unit, nbytes in (("F4", 2, 1), ("F4", 6, 3), ("F6_E2M3", 4, 3), ("F6_E3M2", 8, 6)):
        for packed, plain in (
            ((h, ffn.each(per_unit)), (h, ffn.each(nbytes))),
            ((ffn.each(), replicated(per_unit)), (ffn.each(), replicated(nbytes))),
        ):
            small, large = packed_plan(dtype, packed, a, b), packed_plan("U8", plain, a, b)
            assert [task.strips for task in small.tasks] == [task.strips for task in large.tasks]


@pytest.mark.parametrize(
    ("dtype", "dims", "tp_size"),
    [
        ("F4", (h, ffn.each()), 2),  # 7 and 6 half-bytes
        ("F4", (replicated(2), ffn.each(3)), 13),
        ("F6_E2M3", (replicated(4), ffn.each(2)), 13),
        ("F6_E3M2", (replicated(4), ffn.each(1)), 2),
    ],
)
def test_sub_byte_cuts_inside_a_byte(dtype: str, dims: tuple[Dim, ...], tp_size: int) -> None:
    dims = (replicated(4), *dims[1:])
    layout = planned.native({"t": (dtype, dims)}, tp_size)
    with pytest.raises((LayoutError, UnsupportedError), match=r"byte"):
        build_plan(place_native(whole_layout(layout.tensors.values())).placed, place_native(layout).placed)


def test_bytes_of_a_shape() -> None:
    assert stored_bytes((3, 4), "F6_E2M3") == 9
    assert stored_bytes((), "F64") == 8
    assert stored_bytes((0, 7), "F4") == 0
    assert sizes_of(((2, 3), None, ()), "BF16") == (12, None, 2)
    with pytest.raises(LayoutError, match=r"F4 \[3, 3\] is not a whole number of bytes"):
        stored_bytes((3, 3), "F4")


# -- two cut dimensions on a grid of ranks, tensors on some ranks only --------------------------------------


GRIDS = [(a, b) for a in range(1, 7) for b in range(1, 7) if a * b <= MOST]


def test_grids_of_expert_and_tensor_parallel_ranks() -> None:
    layouts = {grid: grid_layout(*grid) for grid in GRIDS}
    values = planned.random_values(layouts[1, 1].tensors.values())
    pairs = list(itertools.product(GRIDS, repeat=2))
    for source, target in [
        *pairs[:: len(pairs) // 60],
        ((1, 1), (3, 4)),
        ((3, 4), (1, 1)),
        ((2, 3), (3, 2)),
        ((5, 2), (2, 5)),
    ]:
        carry(layouts[source], layouts[target], values)


def test_taking_a_tensor_off_ranks() -> None:
    base = cut_dims((ffn.each(), h), 3)
    assert held_by(base, [1]).shapes == (None, base.shapes[1], None)
    assert held_by(base, range(3)) is base
    with pytest.raises(LayoutError, match="without dimensions"):
        held_by(whole_cut((), 3), [0])


# -- layouts of any kind -------------------------------------------------------------------------------------


@st.composite
def any_partition(draw: st.DrawFn, extent: int, size: int, padded: bool) -> Partition:
    """Stretches of a dimension on any ranks, in any order on each, with padding anywhere; every index on some."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=4))) if extent > 1 else []
    ranks: list[list[Run]] = [[] for _ in range(size)]
    for start, stop in itertools.pairwise([0, *cuts, extent]):
        for rank in draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size)):
            ranks[rank].append(Run(start, stop - start))
    out = []
    for runs in ranks:
        if padded and runs and draw(st.booleans()):
            runs.append(Run(-1, draw(st.integers(1, 2))))
        out.append(tuple(draw(st.permutations(runs))))
    return interned(extent, tuple(out))


@st.composite
def any_pair(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two layouts of one tensor that cut the same two dimensions at most."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    found = []
    ways = sorted(draw(st.permutations(range(len(shape))))[: draw(st.integers(0, min(2, len(shape))))])
    for _ in range(2):
        grid = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        dims: list[Partition | None] = [None] * len(shape)
        for side, way in enumerate(ways):
            dims[way] = draw(any_partition(shape[way], grid[side], draw(st.booleans())))
        tensors = {"t": Logical("t", "I16", shape)}
        size = grid[0] * grid[1]
        stored = Stored("t", "I16", (Piece("t", cut(planned.on_grid(dims, shape, grid), size)),))
        found.append(Layout(size, tensors, (stored,)))
    return found[0], found[1]


@settings(max_examples=300, deadline=None)
@given(any_pair())
def test_any_layout_to_any_other(pair: tuple[Layout, Layout]) -> None:
    values = planned.random_values(pair[0].tensors.values())
    carry(*pair, values)


# -- fused stored tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 4), (2, 5), (8, 3), (3, 12), (12, 1)])
def test_fused_tensors_there_and_back(a: int, b: int) -> None:
    fused, other = fused_layout(a), fused_layout(b, "kqv")
    tensors = fused.tensors
    whole = whole_layout(tensors.values())
    values = planned.random_values(tensors.values())
    for source, target in ((whole, fused), (fused, whole), (fused, other)):
        plan = carry(source, target, values)
        qkv = next(task for task in plan.tasks if task.tensor in ("q.w", "k.w"))
        fused_ends = plan.writes if target.stored[1].name == "qkv_proj" else plan.reads
        assert any(extent.tensor == "qkv_proj" for extent in fused_ends)
        moved = {plan.reads[n].tensor for n in qkv.reads} | {plan.writes[n].tensor for n in qkv.writes}
        assert moved <= {"qkv_proj", "q.w", "k.w", "v.w"}, "one task moves all of a fused tensor and nothing else"
        if source is whole or target is whole:
            assert moved == {"qkv_proj", "q.w", "k.w", "v.w"}
        numbers = [n for task in plan.tasks for n in task.reads]
        assert sorted(numbers) == list(range(len(plan.reads))), "no extent in two tasks"


def test_a_fused_source_is_taken_apart() -> None:
    """One logical tensor in several stored ones: [q;k;v] of the source as q and kv of the target."""
    qkv = gqa.query(2) + gqa.kv(2) * 2
    tensors = {"qkv": Logical("qkv", "BF16", (qkv.extent, 3))}
    values = planned.random_values(tensors.values())
    q_rows = gqa.query(2).extent
    for tp_size in (1, 2, 6):
        ranks = cut_dims((qkv,), tp_size).dims[0].ranks
        queries = interned(qkv.extent, tuple(joined(clipped(r, 0, q_rows) for r in runs) for runs in ranks))
        others = interned(qkv.extent, tuple(joined(clipped(r, q_rows, qkv.extent) for r in runs) for runs in ranks))
        rest = cut_dims((h,), tp_size).dims[0]
        apart = Layout(
            tp_size,
            tensors,
            tuple(
                Stored(name, "BF16", (Piece("qkv", cut((part, rest), tp_size)),))
                for name, part in (("q", queries), ("kv", others))
            ),
        )
        for source, target in itertools.permutations((whole_layout(tensors.values()), apart), 2):
            carry(source, target, values)


def test_as_many_stored_as_logical_tensors_and_yet_not_one_to_one() -> None:
    """Two tensors fused into one and a third in two halves: the counts agree, the tasks must not be mixed up."""
    tensors = {n: Logical(n, "U8", (4, 3)) for n in "abc"}
    both = whole_cut((4, 3))
    upper = cut((planned.ranks_of(4, [(0, 2)]), both.dims[1]), 1)
    lower = cut((planned.ranks_of(4, [(2, 2)]), both.dims[1]), 1)
    odd_one = Layout(
        1,
        tensors,
        (
            Stored("ab", "U8", (Piece("a", both), Piece("b", both))),
            Stored("c1", "U8", (Piece("c", upper),)),
            Stored("c2", "U8", (Piece("c", lower),)),
        ),
    )
    values = planned.random_values(tensors.values())
    for source, target in itertools.permutations((whole_layout(tensors.values()), odd_one), 2):
        carry(source, target, values)
    carry(odd_one, odd_one, values)


# -- what cannot be joined -----------------------------------------------------------------------------------


def one(cut_: Cut, dtype: str = "U8", name: str = "t", shape: tuple[int, ...] = (6, 4)) -> Layout:
    return Layout(cut_.size, {name: Logical(name, dtype, shape)}, (Stored(name, dtype, (Piece(name, cut_),)),))


def rows(*ranks: list[tuple[int, int]]) -> Cut:
    return cut((planned.ranks_of(6, *ranks), cut_dims((replicated(4),), len(ranks)).dims[0]), len(ranks))


def planned_between(source: Layout, target: Layout) -> Plan:
    return build_plan(place_native(source).placed, place_native(target).placed)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (one(rows([(0, 3)], [(4, 2)])), one(rows([(0, 6)])), "no source rank holds index 3"),
        (one(rows([(0, 6)])), one(rows([(0, 3)], [(4, 2)])), "no target rank takes index 3"),
        (one(rows([(0, 5)])), one(rows([(0, 6)])), "no source rank holds index 5"),
        (one(rows([(0, 6)])), one(rows([(1, 5)])), "no target rank takes index 0"),
        (one(rows([], [])), one(rows([(0, 6)])), "no source rank holds the tensor"),
        (one(rows([(0, 6)])), one(rows([(0, 6)]), "I8"), "cannot be joined by copying"),
        (one(rows([(0, 6)])), one(whole_cut((4, 6))), "cannot be joined by copying"),
        (one(rows([(0, 6)])), one(rows([(0, 6)]), name="u"), "only one of the layouts holds t, u"),
        (one(rows([(0, 6)])), one(rows([], [])), "no target rank takes the tensor"),
    ],
)
def test_layouts_that_do_not_fit(source: Layout, target: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        planned_between(source, target)


def test_one_degree_cannot_cut_two_dimensions_of_a_tensor() -> None:
    """Rank r would hold the r-th part of the r-th part, and nobody the rest."""
    tensors = {"t": ("U8", (experts.each(), ffn.each(), h))}
    with pytest.raises(LayoutError, match="t: no target rank takes index"):
        planned_between(planned.native(tensors, 1), planned.native(tensors, 2))


def test_three_cut_dimensions_are_refused() -> None:
    part = planned.ranks_of(2, [(0, 1)], [(1, 1)])
    layout = one(cut((part, part, part), 2), shape=(2, 2, 2))
    with pytest.raises(LayoutError, match="at most two"):
        planned_between(layout, one(whole_cut((2, 2, 2)), shape=(2, 2, 2)))


def test_stored_tensors_that_contradict_their_layout() -> None:
    whole = one(rows([(0, 6)]))
    nowhere = Layout(1, {**whole.tensors, "u": Logical("u", "U8", (1,))}, whole.stored)
    with pytest.raises(LayoutError, match="u is a tensor of the layout and stored nowhere"):
        planned_between(nowhere, nowhere)
    stray = Layout(1, whole.tensors, (*whole.stored, Stored("u", "U8", (Piece("u", whole_cut((1,))),))))
    with pytest.raises(LayoutError, match="u stores u, which is no tensor"):
        planned_between(stray, stray)
    none = Layout(1, whole.tensors, (*whole.stored, Stored("u", "U8", ())))
    with pytest.raises(LayoutError, match="at least one piece"):
        planned_between(whole, none)
    with pytest.raises(LayoutError, match="cut for 2 ranks in a layout of 1"):
        cut((planned.ranks_of(2, [(0, 2)], [(0, 2)]),), 1)


def test_pieces_that_cannot_be_laid_together() -> None:
    tensors = {n: Logical(n, "U8", shape) for n, shape in (("a", (6, 4)), ("b", (6, 3)))}

    def laid(*cuts: Cut, dim: int = 0) -> Layout:
        pieces = tuple(Piece(n, c) for n, c in zip("ab", cuts, strict=True))
        return Layout(cuts[0].size, tensors, (Stored("ab", "U8", pieces, dim),))

    assert laid(whole_cut((6, 4)), whole_cut((6, 3)), dim=1).stored[0].shape(0) == (6, 7)
    for layout in (
        laid(whole_cut((6, 4)), whole_cut((6, 3))),
        laid(whole_cut((6, 4)), whole_cut((6, 3)), dim=2),
    ):
        with pytest.raises(LayoutError, match=r"ab: the pieces .* cannot be laid along dimension"):
            layout.stored[0].shape(0)


def test_a_rank_lays_what_it_holds_of_the_pieces() -> None:
    """Experts dealt to ranks: each stores its own, one after the other."""
    tensors = {n: Logical(n, "U8", (6, 4)) for n in "ab"}
    pieces = (Piece("a", rows([(0, 6)], [])), Piece("b", rows([(0, 2)], [(2, 4)])))
    assert Layout(2, tensors, (Stored("ab", "U8", pieces),)).stored[0].shapes == ((8, 4), (4, 4))
