"""How units are dealt to ranks, held against plain enumeration of indices."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpshard.axes import Axis, Dim, Heads, Padded, Units, replicated
from tpshard.errors import LayoutError, UnsupportedError, UsageError
from tpshard.intervals import PAD, Run, clipped, dealt, joined, shifted, total, whole
from tpshard.partition import Partition, interned, partition, require

HEADS = [(kv, group) for kv in range(1, 9) for group in range(1, 7)]


def indices(runs: tuple[Run, ...]) -> list[int]:
    """The stored order spelled out; -1 for padding."""
    return [PAD if run.start == PAD else run.start + i for run in runs for i in range(run.length)]


@given(st.integers(0, 60), st.integers(1, 70))
def test_units_are_dealt_in_order_and_the_first_ranks_take_one_more(units: int, tp_size: int) -> None:
    bounds = dealt(units, tp_size)
    assert [unit for start, stop in bounds for unit in range(start, stop)] == list(range(units))
    sizes = [stop - start for start, stop in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


# -- query and kv heads as one decision ----------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "group"), HEADS)
def test_heads_at_every_degree(kv: int, group: int) -> None:
    heads = Heads("heads", kv * group, kv)
    assert heads.parts() == kv * group
    for tp_size in range(1, heads.parts() + 1):
        query, of_kv = heads.bounds("query", tp_size), heads.bounds("kv", tp_size)
        assert [h for start, stop in query for h in range(start, stop)] == list(range(kv * group)), (
            "dealt once, in order"
        )
        assert all(stop > start for start, stop in query), "no rank without a head"
        sizes = [stop - start for start, stop in query]
        for rank, (start, stop) in enumerate(query):
            groups = {head // group for head in range(start, stop)}
            assert set(range(*of_kv[rank])) == groups, "exactly the kv heads of its query heads"
            if len(groups) > 1:
                assert start % group == stop % group == 0, "a part of a group next to another group"
        if tp_size <= kv:
            assert max(sizes) - min(sizes) <= group
            assert sum(stop - start for start, stop in of_kv) == kv, "no copies while there are groups enough"
        else:
            assert max(sizes) <= group
            ranks_of = [{r for r in range(tp_size) if of_kv[r] == (g, g + 1)} for g in range(kv)]
            assert sum(map(len, ranks_of)) == tp_size
            assert max(map(len, ranks_of)) - min(map(len, ranks_of)) <= 1
            for ranks in ranks_of:
                assert max(sizes[r] for r in ranks) - min(sizes[r] for r in ranks) <= 1
        counts = {view: {stop - start for start, stop in heads.bounds(view, tp_size)} for view in ("query", "kv")}
        assert heads.is_equal(tp_size) == all(len(count) == 1 for count in counts.values())
    assert not heads.is_equal(0)
    assert not heads.is_equal(heads.parts() + 1)


@pytest.mark.parametrize(("kv", "group"), HEADS)
@pytest.mark.parametrize("step", [2, 3, 4])
def test_heads_that_must_stay_together(kv: int, group: int, step: int) -> None:
    heads = Heads("heads", kv * group, kv, step)
    assert 1 <= heads.parts() <= kv * group
    for tp_size in range(1, heads.parts() + 1):
        query = heads.bounds("query", tp_size)
        assert [h for start, stop in query for h in range(start, stop)] == list(range(kv * group))
        for start, stop in query:
            assert stop > start
            assert start % step == 0, "a step cut in two"
            assert stop % step == 0 or stop == kv * group
            groups = {head // group for head in range(start, stop)}
            if len(groups) > 1:
                assert start % group == stop % group == 0
        assert all(
            (start // group, (stop - 1) // group + 1) == of_kv
            for (start, stop), of_kv in zip(query, heads.bounds("kv", tp_size), strict=True)
        )
        assert heads.is_equal(tp_size) == Axis.is_equal(heads, tp_size) == (len({b - a for a, b in query}) == 1)
    assert not heads.is_equal(heads.parts() + 1)


def test_heads_in_quantisation_groups() -> None:
    six = Heads("heads", 6, 6, step=2)  # two heads share a quantisation group of o_proj's columns
    assert six.parts() == 3
    assert six.bounds("query", 3) == six.bounds("kv", 3) == ((0, 2), (2, 4), (4, 6))
    assert six.bounds("query", 2) == ((0, 4), (4, 6))
    with pytest.raises(UnsupportedError, match="at most 3 ranks"):
        require(six, 4)
    four = Heads("heads", 4, 4, step=2)
    assert four.parts() == 2
    assert four.bounds("query", 2) == ((0, 2), (2, 4))
    grouped = Heads("heads", 32, 8, step=2)  # four query heads a group: two steps of each
    assert grouped.parts() == 16
    assert grouped.bounds("query", 16)[:3] == ((0, 2), (2, 4), (4, 6))
    assert grouped.bounds("kv", 16)[:3] == ((0, 1), (0, 1), (1, 2))


@pytest.mark.parametrize(("query", "kv"), [(6, 4), (4, 0), (0, 1), (3, 6), (1, -1)])
def test_heads_that_do_not_group(query: int, kv: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{query} query heads cannot be grouped over {kv} kv heads"):
        Heads("heads", query, kv)


# -- units and padding ---------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 7), st.data())
def test_units_in_steps(count: int, step: int, data: st.DataObject) -> None:
    units = Units("ffn", count, step)
    tp_size = data.draw(st.integers(1, units.parts()))
    bounds = units.bounds("unit", tp_size)
    assert [u for start, stop in bounds for u in range(start, stop)] == list(range(count))
    assert all(stop > start and start % step == 0 for start, stop in bounds)
    assert units.is_equal(tp_size) == (len({stop - start for start, stop in bounds}) == 1)


@given(st.integers(1, 60), st.integers(1, 9), st.data())
def test_padding_makes_ranks_equal(count: int, multiple: int, data: st.DataObject) -> None:
    vocab = Padded("vocab", count, multiple)
    tp_size = data.draw(st.integers(1, count))
    bounds, padding = vocab.bounds("unit", tp_size), vocab.padding(tp_size)
    assert [u for start, stop in bounds for u in range(start, stop)] == list(range(count))
    sizes = {stop - start + pad for (start, stop), pad in zip(bounds, padding, strict=True)}
    assert len(sizes) == 1
    assert vocab.is_equal(tp_size)
    (each,) = sizes
    assert each % multiple == 0
    assert (each - multiple) * tp_size < count <= each * tp_size, "not a multiple more than needed"
    stored = partition(vocab.each(3), tp_size)
    assert sum(indices(runs).count(PAD) for runs in stored.ranks) == 3 * (each * tp_size - count)


def test_padding_is_last_and_may_fill_whole_ranks() -> None:
    cut = partition(Padded("vocab", 9).each(), 7)  # two a rank: the fifth has one, the last two have none
    assert [indices(runs) for runs in cut.ranks] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, PAD], [PAD] * 2, [PAD] * 2]


# -- dimensions against enumeration --------------------------------------------------------------------------

ffn, vocab = Units("ffn", 11, step=2), Padded("vocab", 10)
gqa, mha, mqa = Heads("gqa", 12, 3), Heads("mha", 5, 5), Heads("mqa", 6, 1)
LIMIT = 5  # every axis above has at least five parts


def owned(axis: Axis, view: str, tp_size: int, rank: int) -> list[int]:
    """The units of a rank, by a rule of its own: deal shares one by one round the ranks, then sort them."""

    def share(units: int, ranks: int, which: int) -> range:
        counts = [0] * ranks
        for unit in range(units):
            counts[unit % ranks] += 1
        return range(sum(counts[:which]), sum(counts[: which + 1]))

    if isinstance(axis, Units):
        return [
            u for part in share(axis.parts(), tp_size, rank) for u in range(part * axis.step, (part + 1) * axis.step)
            if u < axis.count
        ]  # fmt: skip
    if isinstance(axis, Padded):
        each = next(n for n in range(axis.count + 1) if n * tp_size >= axis.count)
        return [u for u in range(rank * each, (rank + 1) * each) if u < axis.count]
    assert isinstance(axis, Heads)
    if tp_size <= axis.kv_heads:
        heads = [g * axis.group + h for g in share(axis.kv_heads, tp_size, rank) for h in range(axis.group)]
    else:
        group = next(g for g in range(axis.kv_heads) if rank in share(tp_size, axis.kv_heads, g))
        ranks = share(tp_size, axis.kv_heads, group)
        heads = [group * axis.group + h for h in share(axis.group, len(ranks), rank - ranks[0])]
    return heads if view == "query" else sorted({head // axis.group for head in heads})


def enumerated(dim: Dim, tp_size: int, rank: int) -> list[int]:
    out, at = [], 0
    for axis, view, start, stop, size, _ in dim.segments:
        if axis is None:
            out += range(at, at + size)
            at += size
            continue
        mine = owned(axis, view, tp_size, rank)
        for unit in range(start, stop):
            if unit in mine:
                out += range(at, at + size)
            at += size
        if isinstance(axis, Padded):
            each = next(n for n in range(axis.count + 1) if n * tp_size >= axis.count)
            out += [PAD] * ((each - len(mine)) * size)
    return out


sizes = st.integers(1, 4)
plain_dims = st.one_of(
    st.builds(ffn.each, sizes),
    st.builds(gqa.query, sizes),
    st.builds(gqa.kv, sizes),
    st.builds(mha.grouped, sizes, sizes, sizes),
    st.builds(gqa.grouped, sizes, sizes, sizes),
    st.builds(gqa.grouped, sizes),
    st.builds(mqa.kv, sizes),
    st.builds(replicated, st.integers(0, 9)),
)
dims = st.recursive(
    plain_dims,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner), st.builds(lambda d, n: d * n, inner, st.integers(1, 3))
    ),
    max_leaves=4,
)


@given(dims, st.integers(1, LIMIT))
def test_every_dimension_is_what_enumeration_says(dim: Dim, tp_size: int) -> None:
    cut = partition(dim, tp_size)
    assert cut.extent == dim.extent == sum(segment.length for segment in dim.segments)
    assert cut.tp_size == tp_size
    for rank, runs in enumerate(cut.ranks):
        assert indices(runs) == enumerated(dim, tp_size, rank)
        assert cut.length(rank) == len(indices(runs))
        assert joined(runs) == runs, "adjacent runs are one"
    assert {i for runs in cut.ranks for i in indices(runs)} == set(range(dim.extent)), "nothing is lost"
    assert partition(dim, tp_size) is cut, "one object for one value"
    assert cut.is_whole == all(indices(runs) == list(range(dim.extent)) for runs in cut.ranks)


@given(st.integers(1, 5), sizes, st.integers(0, 6))
def test_padded_dimension_behind_others(tp_size: int, size: int, before: int) -> None:
    dim = replicated(before) + vocab.each(size)
    for rank, runs in enumerate(partition(dim, tp_size).ranks):
        assert indices(runs) == enumerated(dim, tp_size, rank)


def test_fusions_keep_their_stored_order() -> None:
    heads = Heads("heads", 4, 2)
    blocks = heads.query(1) + heads.kv(1) * 2  # [q0 q1 q2 q3; k0 k1; v0 v1]
    assert [indices(runs) for runs in partition(blocks, 2).ranks] == [[0, 1, 4, 6], [2, 3, 5, 7]]
    by_group = heads.grouped(1, 1, 1)  # [q0 q1 k0 v0; q2 q3 k1 v1]
    assert [indices(runs) for runs in partition(by_group, 2).ranks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [indices(runs) for runs in partition(by_group, 4).ranks] == [[0, 2, 3], [1, 2, 3], [4, 6, 7], [5, 6, 7]]
    alternating = Units("ffn", 3).each(2)  # [gate0 up0 gate1 up1 gate2 up2]
    assert [indices(runs) for runs in partition(alternating, 2).ranks] == [[0, 1, 2, 3], [4, 5]]


def test_axes_of_a_dimension() -> None:
    dim = ffn.each() + replicated(3) + gqa.kv(2) + ffn.each(2)
    assert dim.axes == (ffn, gqa)
    assert replicated(4).axes == ()
    assert ffn.each() == Units("ffn", 11, step=2).each(), "equal by value"
    assert hash(ffn.each()) == hash(Units("ffn", 11, step=2).each())


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [ffn, vocab, gqa, mqa, Heads("s", 6, 6, 4)])
def test_more_ranks_than_parts(axis: Units | Padded | Heads) -> None:
    dim = axis.query(1) if isinstance(axis, Heads) else axis.each()
    partition(dim, axis.parts())
    for tp_size in (axis.parts() + 1, 10**9):
        with pytest.raises(UnsupportedError, match=f"{tp_size} ranks.*'{axis.name}'.*at most {axis.parts()} ranks"):
            partition(dim, tp_size)


@pytest.mark.parametrize("tp_size", [0, -1, -(10**9)])
def test_degrees_below_one(tp_size: int) -> None:
    with pytest.raises(UsageError, match=f"degree of {tp_size}"):
        require(ffn, tp_size)


@pytest.mark.parametrize(
    "runs",
    [
        (Run(0, 5),),
        (Run(3, 2),),
        (Run(0, 2), Run(1, 2)),
        (Run(0, 1), Run(0, 1)),
        (Run(2, -1),),
        (Run(-3, 2),),
        (Run(PAD, 2), Run(4, 1)),
        (Run(PAD, -2),),
    ],
)
def test_runs_out_of_bounds_or_twice(runs: tuple[Run, ...]) -> None:
    with pytest.raises(LayoutError):
        interned(4, (runs,))


def test_ranks_may_share_and_reorder() -> None:
    assert isinstance(interned(4, ((Run(2, 2), Run(0, 2)), (Run(0, 4),), ())), Partition)


def test_too_many_groups_to_list() -> None:
    with pytest.raises(UnsupportedError, match="stored group by group"):
        Heads("heads", 2**40, 2**40).grouped(1, 1)


# -- runs ----------------------------------------------------------------------------------------------------

runs_lists = st.lists(
    st.one_of(
        st.builds(Run, st.integers(0, 30), st.integers(0, 5)), st.builds(Run, st.just(PAD), st.integers(0, 3))
    ),
    max_size=8,
)  # fmt: skip


@given(runs_lists, st.integers(0, 40))
def test_runs_keep_their_indices(runs: list[Run], by: int) -> None:
    one = joined(runs)
    assert indices(one) == indices(tuple(runs))
    assert all(run.length for run in one)
    assert not any(
        a.start == PAD == b.start or (PAD not in (a.start, b.start) and a.start + a.length == b.start)
        for a, b in pairwise(one)
    )
    assert total(one) == len(indices(one))
    assert indices(shifted(runs, by)) == [i if i == PAD else i + by for i in indices(tuple(runs))]


@given(st.integers(0, 20), st.integers(0, 9), st.integers(0, 30), st.integers(0, 30))
def test_clipping(start: int, length: int, low: int, high: int) -> None:
    run = clipped(Run(start, length), low, high)
    assert indices((run,)) == [i for i in range(start, start + length) if low <= i < high]
    assert whole(length) == ((Run(0, length),) if length else ())
