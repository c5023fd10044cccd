"""Ranks on local shapes in the lockstep run: only what differs from the zero-padded way.

Tensors are used exactly as they are stored, in their stored order, so a table that stores heads in an
order that no rank could use shows here, where zero-padding would put every head back in its place.
"""

from __future__ import annotations

from typing import Any

import torch

from tpshard.intervals import Runs, whole

from .judge import Judge
from .participant import Arrival, Participant
from .points import Point
from .streamed import StreamedMatrix


class LocalMatrix(StreamedMatrix):
    """A rank's part of a matrix as a linear map from the rank's inputs to the rank's outputs."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.compact = True

    def _runs(self) -> tuple[Runs, Runs]:
        assert self.part is not None
        rows, columns = (whole(length) for length in self.part.shape)
        return (columns, rows) if self.transposed else (rows, columns)


class LocalParticipant(Participant):
    """A rank that holds nothing but what it stores. Its skeleton has been through :func:`.localshapes.localise`."""

    matrix = LocalMatrix
    as_stored = True

    def fetch(self, name: str) -> torch.Tensor:
        """A tensor as it is stored; zero where it does not count."""
        self.used.add(name)
        part = self.store.parts.get(name)
        if part is None:
            return super().fetch(name)
        watch, done = self._watch(name)
        value = self.store.local(part, self.compute, watch).to(self.device)
        done()
        return torch.zeros_like(value) if name in self.once and self.number > 1 else value


class LocalJudge(Judge):
    """Judges ranks whose tensors between column- and row-parallel modules are narrower than the reference's."""

    own_shapes = True

    def _replicated(self, point: Point, tag: str, arrivals: list[Arrival]) -> list[Any]:
        expected = arrivals[0].values
        if any(_narrower(expected, arrival.values) for arrival in arrivals[1:]):
            # Inside a block a norm sees the rank's heads alone: the sum at the block's end compares them.
            return [arrival.values[1:] for arrival in arrivals]
        return super()._replicated(point, tag, arrivals)


def _narrower(expected: list[Any], found: list[Any]) -> bool:
    """Whether a rank brings, out of inputs of another shape than the reference's, outputs of another shape."""
    if not torch.is_tensor(expected[0]) or not torch.is_tensor(found[0]):
        return False
    outs = [(a, b) for a, b in zip(expected[1:], found[1:], strict=True) if torch.is_tensor(a) and torch.is_tensor(b)]
    return expected[0].shape != found[0].shape and any(a.shape != b.shape for a, b in outs)
