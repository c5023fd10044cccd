"""A plan with any fault in it must not be proven; what a fault is, is found by counting every single byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import kinds
import numpy as np
import planned
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tpshard.errors import LayoutError
from tpshard.layout import whole_layout
from tpshard.place import place_native
from tpshard.planning import build_plan
from tpshard.prove import prove
from tpshard.routing import Copy, Extent, Fill, Route, Same, Span, Strip, Task, Zero


class Parts(NamedTuple):
    tasks: tuple[Task, ...]
    reads: tuple[Extent, ...]
    writes: tuple[Extent, ...]


def parts(source: Any, target: Any) -> Parts:
    plan = build_plan(place_native(source).placed, place_native(target).placed)
    return Parts(plan.tasks, plan.reads, plan.writes)


def plans() -> dict[str, Parts]:
    names = ("column", "row", "gqa.qkv", "gqa.grouped", "embed", "head.t", "norm", "scalar", "empty", "packed")
    some = {name: kinds.CUT[name] for name in names}
    one, three, four = (planned.native(some, tp_size) for tp_size in (1, 3, 4))
    grids = [kinds.grid_layout(2, 3), kinds.grid_layout(4, 1)]
    fused = kinds.fused_layout(2)
    whole = whole_layout(fused.tensors.values())
    return {
        "split": parts(one, four),
        "reshard": parts(four, three),
        "merge": parts(three, one),
        "grid": parts(*grids),
        "grid back": parts(*reversed(grids)),
        "fuse": parts(whole, fused),
        "take apart": parts(fused, whole),
    }


PLANS = plans()


def is_right(plan: Parts) -> bool:
    """Every byte written once and every source byte accounted for, counted one by one."""
    written = [np.zeros(extent.nbytes, int) for extent in plan.writes]
    seen = [np.zeros(extent.nbytes, int) for extent in plan.reads]
    listed_reads = sorted(n for task in plan.tasks for n in task.reads)
    listed_writes = sorted(n for task in plan.tasks for n in task.writes)
    if listed_reads != list(range(len(plan.reads))) or listed_writes != list(range(len(plan.writes))):
        return False
    for task in plan.tasks:
        for rows, sources, targets, route in task.strips:

            def mark(
                counts: Sequence[np.ndarray[Any, Any]],
                spans: Sequence[Span],
                allowed: Sequence[int],
                end: int,
                at: int,
                length: int,
                rows: int = rows,
            ) -> bool:
                if not 0 <= end < len(spans) or not 0 <= spans[end].extent < len(allowed):
                    return False
                span = spans[end]
                if rows < 0 or at < 0 or length < 0 or at + length > span.width or span.at < 0:
                    return False
                held = counts[allowed[span.extent]]
                if span.at + rows * span.width > len(held):
                    return False
                held[span.at : span.at + rows * span.width].reshape(rows, span.width)[:, at : at + length] += 1
                return True

            good = True
            for copy in route.copies:
                good &= mark(written, targets, task.writes, copy.target, copy.target_at, copy.length)
                good &= mark(seen, sources, task.reads, copy.source, copy.source_at, copy.length)
            for fill in route.fills:
                good &= mark(written, targets, task.writes, fill.target, fill.target_at, fill.length)
            for same in route.same:
                good &= mark(seen, sources, task.reads, same.source, same.source_at, same.length)
                good &= mark(seen, sources, task.reads, same.other, same.other_at, same.length)
            for zero in route.zeros:
                good &= mark(seen, sources, task.reads, zero.source, zero.source_at, zero.length)
            if not good:
                return False
    return all((counts == 1).all() for counts in written) and all((counts > 0).all() for counts in seen)


@pytest.mark.parametrize("name", PLANS)
def test_right_plans_are_proven(name: str) -> None:
    assert is_right(PLANS[name])
    prove(*PLANS[name])


def edited(items: Sequence[Any], at: int, change: Callable[[Any], Sequence[Any]]) -> tuple[Any, ...]:
    return (*items[:at], *change(items[at]), *items[at + 1 :])


@st.composite
def edits(draw: st.DrawFn, items: Sequence[Any], change: Callable[[st.DrawFn, Any], Any] | None) -> tuple[Any, ...]:
    """One member dropped, doubled, or changed in place."""
    at = draw(st.integers(0, len(items) - 1))
    kind = draw(st.sampled_from(["drop", "double", *(["change"] * 4 if change else [])]))
    if kind == "drop":
        return edited(items, at, lambda item: [])
    if kind == "double":
        return edited(items, at, lambda item: [item, item])
    assert change is not None
    new = change(draw, items[at])
    return edited(items, at, lambda item: [new])


STEPS = st.sampled_from([-8, -3, -2, -1, 1, 2, 3, 6, 8, 100, 10**12])


def other_numbers(draw: st.DrawFn, item: Any) -> Any:
    """One number of a record moved, or two of equal kind exchanged."""
    numbers = [n for n, value in enumerate(item) if isinstance(value, int)]
    which = draw(st.sampled_from(numbers))
    if draw(st.booleans()):
        return item._make(edited(item, which, lambda value: [value + draw(STEPS)]))
    other = draw(st.sampled_from(numbers))
    values = list(item)
    values[which], values[other] = values[other], values[which]
    return item._make(values)


def other_route(draw: st.DrawFn, route: Route) -> Route:
    kinds = [n for n, found in enumerate(route) if found]
    if not kinds:
        return route
    which = draw(st.sampled_from(kinds))
    return route._replace(**{Route._fields[which]: draw(edits(route[which], other_numbers))})


def other_strip(draw: st.DrawFn, strip: Strip) -> Strip:
    kind = draw(st.sampled_from(["rows", "sources", "targets", "route", "route", "route"]))
    if kind == "rows":
        return strip._replace(rows=strip.rows + draw(STEPS))
    if kind == "route":
        return strip._replace(route=other_route(draw, strip.route))
    ends = strip.sources if kind == "sources" else strip.targets
    return strip._replace(**{kind: draw(edits(ends, other_numbers))}) if ends else strip


def other_task(draw: st.DrawFn, task: Task) -> Task:
    kind = draw(st.sampled_from(["reads", "writes", *(["strips"] * 4 if task.strips else [])]))
    if kind == "strips":
        return task._replace(strips=draw(edits(task.strips, other_strip)))
    numbers: tuple[int, ...] = getattr(task, kind)
    return task._replace(**{kind: draw(edits(numbers, lambda draw, n: n + draw(STEPS)))})


@st.composite
def faulty(draw: st.DrawFn) -> Parts:
    plan = PLANS[draw(st.sampled_from(sorted(PLANS)))]
    kind = draw(st.sampled_from(["tasks"] * 8 + ["reads", "writes"]))
    if kind == "tasks":
        return plan._replace(tasks=draw(edits(plan.tasks, other_task)))
    return plan._replace(
        **{kind: draw(edits(getattr(plan, kind), lambda draw, e: e._replace(nbytes=max(0, e.nbytes + draw(STEPS)))))}
    )


@settings(max_examples=1500, deadline=None)
@given(faulty())
def test_every_planted_fault_is_found(plan: Parts) -> None:
    assume(all(extent.nbytes < 10**6 for extent in (*plan.reads, *plan.writes)))
    if not is_right(plan):
        with pytest.raises(LayoutError):
            prove(*plan)


# -- one of each, with its message ---------------------------------------------------------------------------

WHOLE = Parts(
    (
        Task(
            "t",
            (
                Strip(
                    4,
                    (Span(0, 0, 6), Span(1, 0, 6)),
                    (Span(0, 0, 8), Span(1, 0, 2)),
                    Route(
                        (Copy(0, 0, 0, 0, 4), Copy(0, 4, 1, 0, 2)),
                        (Fill(0, 4, 4),),
                        (Same(0, 0, 1, 0, 4),),
                        (Zero(1, 4, 2),),
                    ),
                ),
            ),
            (0, 1),
            (0, 1),
        ),
    ),
    (Extent("a", 0, 0, 24), Extent("b", 1, 0, 24)),
    (Extent("c", 0, 0, 32), Extent("d", 1, 0, 8)),
)


def with_route(**changes: Any) -> Parts:
    (task,) = WHOLE.tasks
    strip = task.strips[0]
    return WHOLE._replace(tasks=(task._replace(strips=(strip._replace(route=strip.route._replace(**changes)),)),))


def with_strips(*strips: Strip) -> Parts:
    return WHOLE._replace(tasks=(WHOLE.tasks[0]._replace(strips=strips),))


(STRIP,) = WHOLE.tasks[0].strips
HALF = STRIP._replace(rows=2)
LOWER = HALF._replace(
    sources=tuple(s._replace(at=2 * s.width) for s in STRIP.sources),
    targets=tuple(t._replace(at=2 * t.width) for t in STRIP.targets),
)


def test_a_plan_in_bands_of_rows() -> None:
    prove(*WHOLE)
    prove(*with_strips(HALF, LOWER))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (with_route(copies=(Copy(0, 0, 0, 0, 4),)), r"a: 16 of 24 bytes are accounted for"),
        (with_route(copies=(Copy(0, 0, 0, 0, 4), Copy(0, 4, 1, 0, 2), Copy(0, 4, 1, 0, 2))), r"d: bytes near .* twice"),
        (with_route(copies=(Copy(0, 0, 0, 1, 4), Copy(0, 4, 1, 0, 2))), r"c: bytes near .* twice"),
        (with_route(copies=(Copy(0, 1, 0, 0, 4), Copy(0, 4, 1, 0, 2)), same=(Same(0, 1, 1, 0, 4),)), r"a: 20 of 24"),
        (with_route(copies=(Copy(0, 0, 0, 0, 4), Copy(0, 4, 1, 0, 3))), r"columns 0:3 of 4 rows of 2 bytes"),
        (with_route(copies=(Copy(0, 0, 0, 0, 4), Copy(0, 4, 2, 0, 2))), r"names end 2 of a strip that has 2"),
        (with_route(copies=(Copy(0, 0, 0, 0, 4), Copy(0, 4, -1, 0, 2))), r"names end -1"),
        (with_route(fills=()), r"c: 16 of 32 bytes are written"),
        (with_route(same=()), r"b: 8 of 24 bytes are accounted for"),
        (with_route(zeros=()), r"b: 16 of 24 bytes are accounted for"),
        (with_strips(HALF), r"a: 12 of 24"),
        (with_strips(HALF, HALF), r"a: 12 of 24|twice"),
        (with_strips(HALF, LOWER, LOWER), r"twice"),
        (with_strips(STRIP._replace(rows=5)), r"a: the plan uses bytes 0:30 of a tensor of 24 bytes"),
        (with_strips(HALF, LOWER._replace(targets=(Span(0, 15, 8), Span(1, 4, 2)))), r"begin inside|written"),
        (
            with_strips(HALF, LOWER._replace(targets=(Span(0, 16, 8), Span(1, 400, 2)))),
            r"d: the plan uses bytes 400:404",
        ),
        (WHOLE._replace(tasks=WHOLE.tasks * 2), r"a is read by 2 tasks"),
        (WHOLE._replace(tasks=()), r"a is read by 0 tasks"),
        (WHOLE._replace(tasks=(WHOLE.tasks[0]._replace(writes=(0,)),)), r"d is written by 0 tasks"),
        (WHOLE._replace(tasks=(WHOLE.tasks[0]._replace(writes=(0, 1, 2)),)), r"there is no number 2"),
        (WHOLE._replace(reads=(*WHOLE.reads, Extent("e", 0, 24, 5))), r"e is read by 0 tasks"),
        (WHOLE._replace(writes=(WHOLE.writes[0], Extent("d", 1, 0, 9))), r"d: 8 of 9 bytes are written"),
    ],
)
def test_faults_and_their_messages(plan: Parts, message: str) -> None:
    assert not is_right(plan)
    with pytest.raises(LayoutError, match=message):
        prove(*plan)


def test_a_task_that_uses_what_another_lists() -> None:
    first = Task("a", (Strip(1, (Span(0, 0, 4),), (Span(0, 0, 4),), Route((Copy(0, 0, 0, 0, 4),))),), (0,), (0,))
    second = Task("b", (Strip(1, (Span(0, 0, 4),), (Span(0, 0, 4),), Route((Copy(0, 0, 0, 0, 4),))),), (1,), (1,))
    extents = (Extent("a", 0, 0, 4), Extent("b", 0, 4, 4))
    prove((first, second), extents, extents)
    both = first.strips[0]._replace(
        targets=(Span(0, 0, 4), Span(1, 0, 4)), route=Route((Copy(0, 0, 0, 0, 4), Copy(0, 0, 1, 0, 4)))
    )
    with pytest.raises(LayoutError, match="a: target 1 is used and not listed"):
        prove((first._replace(strips=(both,)), second), extents, extents)
    # Tasks of one geometry are proven once: the second must not pass because the first did.
    swapped = second._replace(strips=(second.strips[0]._replace(targets=(Span(1, 0, 4),)),))
    with pytest.raises(LayoutError):
        prove((first, swapped), extents, extents)


def test_equal_geometries_of_other_sizes_are_not_taken_for_one() -> None:
    route = Route((Copy(0, 0, 0, 0, 4),))
    tasks = tuple(
        Task(name, (Strip(1, (Span(0, 0, 4),), (Span(0, 0, 4),), route),), (n,), (n,)) for n, name in enumerate("ab")
    )
    extents = (Extent("a", 0, 0, 4), Extent("b", 0, 4, 8))
    with pytest.raises(LayoutError, match="b: 4 of 8"):
        prove(tasks, extents, extents)


def test_empty_tensors() -> None:
    nothing = (Extent("a", 0, 0, 0),)
    prove((Task("a", (), (0,), (0,)),), nothing, nothing)
    prove(
        (Task("a", (Strip(0, (Span(0, 0, 4),), (Span(0, 0, 4),), Route((Copy(0, 0, 0, 0, 4),))),), (0,), (0,)),),
        nothing,
        nothing,
    )
