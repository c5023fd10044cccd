"""Participants that run the same model in lockstep and exchange tensors where a tensor-parallel group would.

A participant is a thread that runs its own model. At a *point* (see :mod:`.points`) it calls
``group.meet(participant, point, payload)`` and gets back the tensor to go on with. How the payloads become
results is the business of the ``resolve`` function that the group was made with, which sees all of them at
once, in the order of the participants. One thread runs at a time and always in the same order, so a run is
deterministic, and at most one participant holds weights.

Groups whose participants are processes offer the same ``meet``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

STACK_BYTES = 4 << 20  # reserved for each thread; deep models nest their modules' calls


class Group(Protocol):
    """Where participants meet."""

    def meet(self, participant: int, point: str, payload: Any) -> Any:
        """Exchange ``payload`` at the point named ``point``; returns what the participant goes on with."""
        ...


class OutOfStepError(Exception):
    """Participants came to different points: their models are not the same."""


class _AbandonedError(BaseException):
    """Ends a participant after another one failed; nothing but the thread's end may catch it."""


class ParticipantError(Exception):
    """A participant's own code failed; ``participant`` says whose, ``point`` the last point that it had passed."""

    def __init__(self, participant: int, point: str, cause: BaseException) -> None:
        super().__init__(f"participant {participant} failed after {point or 'the start'}: {cause}")
        self.participant, self.point, self.cause = participant, point, cause


class ThreadGroup:
    """Participants as threads of this process, one running at a time.

    Args:
        size: number of participants.
        resolve: ``resolve(point, payloads) -> results``, one a participant; run by the last to arrive.
    """

    END = "(the end)"

    def __init__(self, size: int, resolve: Callable[[str, list[Any]], Sequence[Any]]) -> None:
        self.size = size
        self._resolve = resolve
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._points = [""] * size
        self._payloads: list[Any] = [None] * size
        self._results: list[Any] = [None] * size
        self._problem: BaseException | None = None

    def meet(self, participant: int, point: str, payload: Any) -> Any:
        passed = self._points[participant]
        self._points[participant], self._payloads[participant] = point, payload
        del payload
        if participant + 1 < self.size:
            self._pass_to(participant + 1)
        else:
            self._resolve_all(passed)
            self._pass_to(0)
        if point == self.END:
            return None
        self._await(participant)
        result, self._results[participant] = self._results[participant], None
        return result

    def _resolve_all(self, passed: str) -> None:
        names = set(self._points)
        if len(names) > 1:
            first = self._points[0]
            other, place = next((n, p) for n, p in enumerate(self._points) if p != first)
            raise OutOfStepError(
                f"after {passed or 'the start'} the reference comes to {first} and rank {other - 1} to {place}"
            )
        payloads, self._payloads = self._payloads, [None] * self.size
        self._results = list(self._resolve(self._points[0], payloads))

    def _pass_to(self, participant: int) -> None:
        self._turns[participant].release()

    def _await(self, participant: int) -> None:
        self._turns[participant].acquire()
        if self._problem is not None:
            raise _AbandonedError

    def run(self, bodies: Sequence[Callable[[], Any]]) -> None:
        """Run one body a participant to the end; each body's value is its payload at the point :attr:`END`.

        Raises:
            ParticipantError: a body raised; the others were ended.
            OutOfStepError: bodies met at different points.
        """

        def thread(participant: int) -> None:
            try:
                self._await(participant)
                self.meet(participant, self.END, bodies[participant]())
            except _AbandonedError:
                pass
            except BaseException as error:
                if self._problem is None:
                    known = isinstance(error, OutOfStepError)
                    self._problem = error if known else ParticipantError(participant, self._points[participant], error)
                for turn in self._turns:
                    turn.release()

        previous = threading.stack_size(STACK_BYTES)
        try:
            threads = [threading.Thread(target=thread, args=(n,), daemon=True) for n in range(self.size)]
            for one in threads:
                one.start()
        finally:
            threading.stack_size(previous)
        self._pass_to(0)
        try:
            for one in threads:
                one.join()
        except BaseException as error:  # an interrupt: let the others end as well
            self._problem = self._problem or error
            for turn in self._turns:
                turn.release()
            raise
        if self._problem is not None:
            raise self._problem
