"""Which degrees a model takes, and what is said of the others."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpshard.axes import Axis, Heads, Padded, Units, replicated
from tpshard.degrees import (
    LISTED,
    Padding,
    Uneven,
    axes_of,
    check_degree,
    describe_padding,
    describe_uneven,
    equal_degrees,
    largest_degree,
    listed,
    paddings,
    uneven,
)
from tpshard.errors import UnsupportedError, UsageError
from tpshard.partition import partition

heads = Heads("heads", 6, 2)
ffn = Units("ffn", 12, noun="feed-forward channels")
groups = Units("groups", 192, step=64, noun="inputs")
vocab = Padded("vocab", 10)
AXES: dict[Axis, str] = {heads: "q_proj.weight", ffn: "up_proj.weight", vocab: "embed.weight"}

axes = st.one_of(
    st.builds(Units, st.just("u"), st.integers(1, 40), st.integers(1, 5)),
    st.builds(Padded, st.just("p"), st.integers(1, 40), st.integers(1, 5)),
    st.builds(lambda kv, group, step: Heads("h", kv * group, kv, step), *[st.integers(1, 8)] * 3),
)


def test_axes_with_the_first_tensor_of_each() -> None:
    q, both = (heads.query(4), replicated(8)), (heads.kv(2), ffn.each())
    dims = {"norm": (replicated(8),), "q": q, "q2": q, "odd": both, "up": (ffn.each(),), "scalar": ()}
    assert axes_of(dims) == {heads: "q", ffn: "odd"}
    assert axes_of({}) == {}


@given(axes)
def test_closed_forms_agree_with_dealing(axis: Axis) -> None:
    for degree in range(-1, axis.parts() + 3):
        assert axis.is_equal(degree) == Axis.is_equal(axis, degree)


@given(st.lists(axes, min_size=1, max_size=3))
def test_degrees_are_those_that_partition_serves(found: list[Axis]) -> None:
    largest = largest_degree(found)
    dims = [axis.query(1) if isinstance(axis, Heads) else axis.each() for axis in found]  # type: ignore[attr-defined]
    for dim in dims:
        partition(dim, largest)
    with pytest.raises(UnsupportedError):
        for dim in dims:
            partition(dim, largest + 1)
    equal = equal_degrees(found)
    assert equal[0] == 1
    for degree in range(1, largest + 1):
        parts = [partition(dim, degree) for dim in dims]
        same = all(len({cut.length(rank) for rank in range(degree)}) == 1 for cut in parts)
        if degree in equal:
            assert same
            assert not uneven(found, degree)
        elif not any(isinstance(axis, Heads) for axis in found):
            assert not same  # kv heads may be unequal where query heads are not
        assert bool(uneven(found, degree)) == (degree not in equal)


def test_what_is_unequal() -> None:
    assert uneven([heads, ffn, vocab], 5) == [Uneven(heads, "query", 1, 2), Uneven(ffn, "unit", 2, 3)]
    assert uneven([heads], 4) == [Uneven(heads, "query", 1, 2)]
    assert uneven([Heads("h", 6, 3)], 2) == [
        Uneven(Heads("h", 6, 3), "query", 2, 4),
        Uneven(Heads("h", 6, 3), "kv", 1, 2),
    ]
    assert paddings([heads, ffn, vocab], 3) == [Padding(vocab, 2)]
    assert paddings([heads, ffn, vocab], 5) == []
    assert describe_uneven(Uneven(heads, "kv", 1, 2)) == "heads: 1 to 2 kv heads a rank (6 query heads over 2 kv heads)"
    assert describe_padding(Padding(vocab, 2)) == "2 padded vocabulary rows"
    assert describe_padding(Padding(vocab, 1)) == "1 padded vocabulary row"


def test_degrees_that_are_taken() -> None:
    assert largest_degree(AXES) == 6
    assert equal_degrees(AXES) == [1, 2, 6]  # 4 would give some query heads one more than others
    for degree in range(1, 7):
        check_degree(degree, AXES)
    for degree in (1, 2, 6):
        check_degree(degree, AXES, even=True)


@pytest.mark.parametrize("degree", [0, -1, -(10**9)])
def test_degrees_that_make_no_sense(degree: int) -> None:
    with pytest.raises(UsageError, match=f"degree of {degree} makes no sense"):
        check_degree(degree, AXES)


@pytest.mark.parametrize("degree", [7, 12, 10**9])
def test_more_ranks_than_heads(degree: int) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_degree(degree, AXES)
    said = str(caught.value)
    for part in ("q_proj.weight", str(degree), "6 query heads over 2 kv heads", "at most 6", "1 to 6", "1, 2, 6"):
        assert part in said


def test_even_refuses_with_the_equal_degrees() -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_degree(4, AXES, even=True)
    for part in ("q_proj.weight", "4 equal parts", "'heads'", "1, 2, 6", "without --even", "1 to 6"):
        assert part in str(caught.value)


def test_quantisation_groups_in_words() -> None:
    both: dict[Axis, str] = {Heads("heads", 6, 6, 2): "o_proj.qweight", groups: "down_proj.qweight"}
    check_degree(2, both)
    check_degree(3, both, even=True)
    with pytest.raises(UnsupportedError) as caught:
        check_degree(2, both, even=True)
    assert "equal degrees are 1, 3 " in str(caught.value)
    with pytest.raises(UnsupportedError) as caught:
        check_degree(6, {groups: "down_proj.qweight"})
    for part in ("down_proj.qweight", "192 inputs", "3 groups of 64", "at most 3 ranks", "1, 3"):
        assert part in str(caught.value)


def test_a_model_of_which_nothing_is_cut() -> None:
    check_degree(1, {})
    for degree in (2, 10**9):
        with pytest.raises(UnsupportedError, match=f"no tensor of the model can be cut, so {degree} ranks"):
            check_degree(degree, {})


def test_huge_axes_cost_nothing() -> None:
    many: dict[Axis, str] = {
        Heads("heads", 1 << 40, 1 << 40): "q",
        Units("ffn", 1 << 41): "up",
        Padded("v", 1 << 47): "e",
    }
    begun = time.process_time()
    assert equal_degrees(many) == [1 << n for n in range(13)]
    with pytest.raises(UnsupportedError):
        check_degree((1 << 40) + 1, many)
    assert time.process_time() - begun < 1


@given(st.lists(st.integers(1, 10**6), max_size=60))
def test_long_lists_are_shortened(degrees: list[int]) -> None:
    text = listed(degrees)
    assert text.count(",") < LISTED
    if len(degrees) <= LISTED:
        assert text == ", ".join(map(str, degrees))
    else:
        assert text.startswith(f"{degrees[0]}, ")
        assert text.endswith(f"... {degrees[-1]}")
