"""What is put together at a point: gathers and sums of parts that are each right, and of ones that are not.

The parts here are exact, so that whatever goes wrong is in how ranks bring them or in how they are put together: an
order, a place, a part brought twice or not at all, a copy that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tpshard.axes import Heads, Padded, Units, replicated  # noqa: E402
from tpshard.layout import cut_dims  # noqa: E402
from tpshard.numerics import exchange  # noqa: E402
from tpshard.numerics.batch import Batch  # noqa: E402
from tpshard.numerics.exchange import ThreadExchange, gathered, resolve, summed  # noqa: E402
from tpshard.numerics.judge import Judge  # noqa: E402
from tpshard.numerics.lockstep import ThreadGroup  # noqa: E402
from tpshard.numerics.participant import Arrival  # noqa: E402
from tpshard.numerics.points import Point  # noqa: E402
from tpshard.numerics.stores import Part, spans  # noqa: E402
from tpshard.verdicts import Measure  # noqa: E402

TOKENS, WIDTH = 3, 4
WIDE = {
    "units": Units("ffn", 13).each(2),
    "padded": Padded("vocab", 13).each(),
    "heads": Heads("heads", 6, 2).query(3),
    "fused": Units("ffn", 7).each() * 2,
}
EVEN = {  # parts of one size at 1 to 4 ranks
    "units": Units("ffn", 12).each(2),
    "padded": Padded("vocab", 12).each(),
    "fused": Units("ffn", 12).each() * 2,
}
COPIED = {"kv": Heads("heads", 6, 2).kv(3), "fused kv": Heads("heads", 6, 2).kv(2) * 2}


def parts_of(dim: Any, tp_size: int) -> list[Part]:
    cut = cut_dims((dim, replicated(WIDTH)), tp_size)
    return [Part("w", "F64", 0, 0, cut, rank) for rank in range(tp_size)]


def brought(whole: Any, part: Part, padded: bool) -> Any:
    """The part of ``whole`` along its last dimension that a rank brings: zero-padded, or as it is stored."""
    runs = part.runs(0)
    if padded:
        out = torch.zeros_like(whole)
        for _, index, length in spans(runs):
            out[..., index : index + length] = whole[..., index : index + length]
        return out
    pieces = [whole[..., s : s + n] if s >= 0 else whole.new_zeros(*whole.shape[:-1], n) for s, n in runs]
    return torch.cat(pieces, -1)


def judged(kind: str, whole: Any, values: list[Any], parts: list[Part], repeats: bool = False) -> list[Measure]:
    batch = Batch(TOKENS, 1, 20, 0, 2.0**-52)
    judge = Judge({"point": Point("point", kind, "w", repeats=repeats)}, batch, torch.float64)
    reference = Arrival(kind, [whole.clone()], False)  # the judge writes what comes next into it
    arrivals = [Arrival(kind, [value], False, part) for value, part in zip(values, parts, strict=True)]
    judge.resolve("point", [reference, *arrivals])
    return judge.ledger.measures


def passes(measures: list[Measure]) -> bool:
    assert measures
    return all(measure.status == "pass" for measure in measures)


def noise(extent: int) -> Any:
    """What the original has at the point, main, free and probe rows: no element is zero or near another."""
    main, probe = torch.randn(2, TOKENS, extent, generator=torch.Generator().manual_seed(extent), dtype=torch.float64)
    return torch.stack([main, main * (1 + 2.0**-52), probe])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [*WIDE, *COPIED])
def test_right_parts_are_gathered(kind: str, tp_size: int, padded: bool) -> None:
    dim = {**WIDE, **COPIED}[kind]
    whole, parts = noise(dim.extent), parts_of(dim, tp_size)
    values = [brought(whole, part, padded) for part in parts]
    assert passes(judged("gather", whole, values, parts, repeats=kind in COPIED))


Mutant = Callable[[list[Any], list[Part]], None]


def exchanged(values: list[Any], parts: list[Part]) -> None:
    width = min(values[0].shape[-1], values[1].shape[-1])
    first, second = values[0].clone(), values[1].clone()
    first[..., :width], second[..., :width] = values[1][..., :width], values[0][..., :width]
    values[0], values[1] = first, second


def reversed_part(values: list[Any], parts: list[Part]) -> None:
    values[0] = values[0].flip(-1)


def rolled(values: list[Any], parts: list[Part]) -> None:
    values[-1] = values[-1].roll(1, -1)


def left_out(values: list[Any], parts: list[Part]) -> None:
    values[0] = torch.zeros_like(values[0])


def doubled(values: list[Any], parts: list[Part]) -> None:
    values[0] = values[0] * 2


def brought_twice(values: list[Any], parts: list[Part]) -> None:
    values[1], parts[1] = values[0], parts[0]


def slightly_off(values: list[Any], parts: list[Part]) -> None:
    values[0] = values[0] * (1 + 1e-9)


MUTANTS = [exchanged, reversed_part, rolled, left_out, doubled, brought_twice, slightly_off]


@pytest.mark.parametrize(
    ("mutant", "padded"),  # zero-padded parts have their places: whoever brings them, they are the same sum
    [(mutant, padded) for mutant in MUTANTS for padded in (False, True) if not (padded and mutant is exchanged)],
    ids=lambda value: value.__name__ if callable(value) else "zero-padded" if value else "as stored",
)
@pytest.mark.parametrize("kind", [*WIDE, *COPIED])
def test_wrong_parts_are_not_gathered(kind: str, mutant: Mutant, padded: bool) -> None:
    """At 2 ranks no part is a copy, at 4 those of KV heads are; each mutant is wrong in both."""
    dim = {**WIDE, **COPIED}[kind]
    for tp_size in (2, 4):
        whole, parts = noise(dim.extent), parts_of(dim, tp_size)
        values = [brought(whole, part, padded) for part in parts]
        before = [value.clone() for value in values]
        mutant(values, parts)
        if all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, values, strict=True)):
            continue  # ranks 0 and 1 have the same KV head: nothing was changed
        assert not passes(judged("gather", whole, values, parts, repeats=kind in COPIED)), tp_size


def test_a_copy_counts_once_and_only_where_copies_may_be() -> None:
    """Where each index is on one rank, a second rank that brings it is added, and shows; a copy may not differ."""
    dim = COPIED["kv"]
    whole, parts = noise(dim.extent), parts_of(dim, 4)
    values = [brought(whole, part, True) for part in parts]
    assert passes(judged("gather", whole, values, parts, repeats=True))
    assert not passes(judged("gather", whole, values, parts, repeats=False))
    values[1] = values[1] * 1.001  # the second copy of the first KV head
    failed = [m for m in judged("gather", whole, values, parts, repeats=True) if m.status == "fail"]
    assert {measure.rank for measure in failed} == {1}


def beside(whole: Any, dim: Any, tp_size: int, more: int) -> tuple[list[Any], list[Part]]:
    """Zero-padded parts of a head, each with logits for added tokens that no rank's part holds, made by every rank."""
    parts = parts_of(dim, tp_size)
    values = []
    for part in parts:
        value = brought(whole, part, True)
        value[..., -more:] = whole[..., -more:]
        values.append(value)
    return values, parts


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_what_every_rank_makes_beside_its_part_counts_once(tp_size: int) -> None:
    dim, more = Padded("vocab", 12).each(), 2
    whole = noise(12 + more)
    values, parts = beside(whole, dim, tp_size, more)
    assert passes(judged("gather", whole, values, parts))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("how", ["other numbers", "nothing", "counted by a rank already"])
def test_what_every_rank_makes_beside_its_part_must_be_the_originals(how: str, rank: int) -> None:
    """Counting it once forgives no rank: each one's own is compared with the original's."""
    dim, more = Padded("vocab", 12).each(), 2
    whole = noise(12 + more)
    values, parts = beside(whole, dim, 3, more)
    values[rank][..., -more:] *= {"other numbers": 1.001, "nothing": 0.0, "counted by a rank already": 3.0}[how]
    failed = {measure.rank for measure in judged("gather", whole, values, parts) if measure.status == "fail"}
    assert rank in failed and failed <= {rank, None}


def test_parts_of_a_head_are_not_taken_for_what_every_rank_makes() -> None:
    """Rows that a rank holds are summed: brought by two ranks, they are twice too large."""
    dim, more = Padded("vocab", 12).each(), 2
    whole = noise(12 + more)
    values, parts = beside(whole, dim, 3, more)
    values[2][..., 0] = whole[..., 0]  # the first rank's row
    assert not passes(judged("gather", whole, values, parts))


@settings(max_examples=60, deadline=None)
@given(tp_size=st.integers(1, 4), fault=st.sampled_from(["none", "twice", "missing", "one rank's sign"]))
def test_sums_of_shares(tp_size: int, fault: str) -> None:
    whole = noise(6)
    shares = torch.randn(tp_size, *whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shares[0] += whole - shares.sum(0)
    values = list(shares)
    values[-1] = values[-1] * {"none": 1.0, "twice": 2.0, "missing": 0.0, "one rank's sign": -1.0}[fault]
    parts = parts_of(Units("ffn", 6).each(), tp_size)
    assert passes(judged("sum", whole, values, parts)) is (fault == "none")


# -- the collectives themselves ------------------------------------------------------------------


def together(tp_size: int, work: Callable[[ThreadExchange], Any]) -> list[Any]:
    """What every rank's ``work`` returns."""
    group, out = ThreadGroup(tp_size, resolve), [None] * tp_size

    def of(rank: int) -> Callable[[], None]:
        def run() -> None:
            out[rank] = work(ThreadExchange(group, rank))

        return run

    group.run([of(rank) for rank in range(tp_size)])
    return out


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(sorted(WIDE | EVEN)), tp_size=st.integers(1, 4),
    fault=st.sampled_from(["none", "places", "part"]),
)  # fmt: skip
def test_a_gather_puts_every_part_in_its_place(kind: str, tp_size: int, fault: str) -> None:
    """The result and the gradients; with the ranks' places or parts exchanged neither is right."""
    assume(fault == "none" or (tp_size > 1 and kind in EVEN))
    dim = (WIDE if fault == "none" and kind in WIDE else EVEN)[kind]
    whole, parts = noise(dim.extent), parts_of(dim, tp_size)
    cotangent = noise(dim.extent + 1)[..., 1:]
    places = [spans(part.runs(0)) for part in parts]
    given_places = [places[1], places[0], *places[2:]] if fault == "places" else places
    order = [1, 0, *range(2, tp_size)] if fault == "part" else list(range(tp_size))

    def work(rank: ThreadExchange) -> tuple[Any, Any, Any]:
        own = brought(whole, parts[order[rank.rank]], False).requires_grad_()
        out = gathered(own, rank, "point", given_places, dim.extent)
        out.backward(cotangent)
        return out.detach(), own.grad, rank.tally.counts

    results = together(tp_size, work)
    for rank, (out, gradient, counts) in enumerate(results):
        assert counts == {"forward all_gather": 1}
        assert torch.equal(out, results[0][0])
        assert torch.equal(out, whole) is (fault == "none")
        if fault == "none":
            assert torch.equal(gradient, brought(cotangent, parts[rank], False))


def test_a_sum_that_is_done_twice_is_another_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are summed once forward and their gradient goes through as it is; a second sum shows in both."""
    x = noise(5)

    def once(rank: ThreadExchange) -> tuple[Any, Any]:
        own = (x * (rank.rank + 1)).requires_grad_()
        out = summed(own, rank, "point")
        out.backward(torch.ones_like(out))
        return out.detach(), own.grad

    for out, gradient in together(3, once):
        torch.testing.assert_close(out, x * 6)
        assert torch.equal(gradient, torch.ones_like(x))

    def twice(rank: ThreadExchange) -> Any:
        return summed(summed(x * (rank.rank + 1), rank, "point"), rank, "again")

    assert not any(torch.allclose(out, x * 6) for out in together(3, twice))
    monkeypatch.setattr(exchange._Sum, "backward", staticmethod(lambda ctx, g: (g * 3, None, None, None)))
    assert not any(torch.equal(gradient, torch.ones_like(x)) for _, gradient in together(3, once))
