"""Participants in lockstep: what one gets back, and how all end when one fails."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tpshard.numerics.lockstep import OutOfStepError, ParticipantError, ThreadGroup


def test_everyone_gets_the_result_and_one_runs_at_a_time() -> None:
    running, order = [0], []

    def resolve(point: str, payloads: list[Any]) -> list[Any]:
        return [sum(payloads)] * len(payloads) if point != ThreadGroup.END else payloads

    group = ThreadGroup(4, resolve)
    results: dict[int, int] = {}

    def body(number: int) -> Any:
        def run() -> int:
            value = number
            for step in range(3):
                running[0] += 1
                assert running[0] == 1
                time.sleep(0.001)
                order.append((step, number))
                running[0] -= 1
                value = group.meet(number, f"step {step}", value)
            results[number] = value
            return value

        return run

    group.run([body(number) for number in range(4)])
    assert results == dict.fromkeys(range(4), 6 * 4 * 4)
    assert order == sorted(order)  # always the same order


def test_a_failure_ends_everyone_and_says_whose_it_was() -> None:
    group = ThreadGroup(3, lambda point, payloads: payloads)

    def body(number: int) -> Any:
        def run() -> None:
            group.meet(number, "first", None)
            if number == 1:
                raise ValueError("no such thing")
            group.meet(number, "second", None)

        return run

    before, started = threading.active_count(), time.monotonic()
    with pytest.raises(ParticipantError, match="no such thing") as caught:
        group.run([body(number) for number in range(3)])
    assert (caught.value.participant, caught.value.point) == (1, "first")
    assert time.monotonic() - started < 5
    assert threading.active_count() == before


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_participants_at_different_points_are_out_of_step(lost: int) -> None:
    group = ThreadGroup(3, lambda point, payloads: payloads)

    def body(number: int) -> Any:
        def run() -> None:
            group.meet(number, "norm", None)
            group.meet(number, "elsewhere" if number == lost else "attention", None)

        return run

    with pytest.raises(OutOfStepError, match="after norm"):
        group.run([body(number) for number in range(3)])


def test_one_that_ends_early_is_out_of_step() -> None:
    group = ThreadGroup(2, lambda point, payloads: payloads)

    def short() -> None:
        group.meet(0, "norm", None)

    def long() -> None:
        group.meet(1, "norm", None)
        group.meet(1, "attention", None)

    with pytest.raises(OutOfStepError):
        group.run([short, long])


def test_a_failing_resolution_is_raised() -> None:
    def resolve(point: str, payloads: list[Any]) -> list[Any]:
        raise KeyError(point)

    group = ThreadGroup(2, resolve)
    with pytest.raises(ParticipantError, match="norm"):
        group.run([lambda n=n: group.meet(n, "norm", None) for n in range(2)])  # type: ignore[misc]
