"""Puts the ranks' tensors together at a point, compares, and says with what everyone goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tpshard.verdicts import Measure, within

from .batch import Batch
from .participant import Arrival
from .points import Point
from .stores import padded_positions, spans

BASE = {torch.float64: 1e-10, torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}
FINE = 1e-12  # in place of 1e-10 for weights of 32 bits and more, whose last bit is 2**16 times smaller than bfloat16's
NARROWED = 1e-7  # a float64 run that goes through float32 inside
FREE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 3e-2}
AMPLIFIED = {1e-10: 1e4, FINE: 1e3}  # how much a sublayer may amplify before its gate is widened; else 10
EXACT = 0.0


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """``||found - expected|| / ||expected||``; infinite where shapes differ or only one is zero or not a number."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else 1.0
    gap = float(torch.linalg.vector_norm((found - expected).flatten(), dtype=torch.float64))
    size = float(torch.linalg.vector_norm(expected.flatten(), dtype=torch.float64))
    if gap == 0.0:
        return 0.0
    value = gap / size if size else math.inf
    return value if math.isfinite(value) else math.inf


@dataclass
class Ledger:
    """What was measured."""

    measures: list[Measure] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    elements: int = 0  # exchanged, for one token

    def count(self, kind: str, elements: int) -> None:
        self.collectives[kind] = self.collectives.get(kind, 0) + 1
        self.elements += elements


class Judge:
    """Resolves the points of one run.

    Args:
        gate_of: given a point and the default gate, the gate to apply.
        fine: whether the weights are stored in 32 bits or more.
    """

    def __init__(
        self,
        points: Mapping[str, Point],
        batch: Batch,
        compute: torch.dtype,
        gate_of: Callable[[str, float], float] = lambda point, gate: gate,
        fine: bool = False,
    ) -> None:
        self.points, self.batch, self.compute, self.gate_of = points, batch, compute, gate_of
        self.fine = fine
        self.ledger = Ledger()
        self.outputs: tuple[torch.Tensor, torch.Tensor] | None = None  # reference's and ranks' free rows
        self.is_causal = False  # whether the model gave logits
        self._visits: dict[str, int] = {}
        self._narrowed = False

    # -- points ---------------------------------------------------------------------------------

    def resolve(self, name: str, arrivals: list[Arrival]) -> list[Any]:
        """One list of tensors a participant."""
        kinds = {arrival.kind for arrival in arrivals}
        if len(kinds) > 1:
            raise RuntimeError(f"{name} is {sorted(kinds)} at once")
        self._narrowed |= arrivals[0].narrowed
        visit = self._visits[name] = self._visits.get(name, 0) + 1
        tag = f"{name}#{visit}"
        kind = arrivals[0].kind
        if kind == "sum":
            return self._sum(self.points[name], tag, arrivals)
        if kind == "gather":
            return self._gather(self.points[name], tag, arrivals)
        if kind == "needs_sum":
            return self._needs_sum(self.points[name], tag, arrivals)
        if kind == "replicated":
            return self._replicated(self.points[name], tag, arrivals)
        return self._end(arrivals)

    def _sum(self, point: Point, tag: str, arrivals: list[Arrival]) -> list[Any]:
        reference = arrivals[0].values[0]
        total = arrivals[1].values[0].clone()
        for arrival in arrivals[2:]:
            total += arrival.values[0]
        self.ledger.count("all_reduce", _width(reference))
        self._compare(point, total, reference)
        others = arrivals[0].values[1:]
        return [[value, *others] for value in self._forced(tag, reference, total, len(arrivals))]

    def _gather(self, point: Point, tag: str, arrivals: list[Arrival]) -> list[Any]:
        reference = arrivals[0].values[0]
        total = torch.zeros_like(reference)
        for rank, arrival in enumerate(arrivals[1:]):
            value = arrival.values[0]
            if value.shape == total.shape and (arrival.parts is None or arrival.parts.shape[0] != value.shape[-1]):
                total += value  # it came zero-padded
                continue
            if arrival.parts is None:
                continue
            runs = arrival.parts.runs(0)
            for at, index, length in spans(runs):
                total[..., index : index + length] += value[..., at : at + length]
            for at, length in padded_positions(runs):
                worst = float(value[..., at : at + length].abs().max())
                self.add(point, "rows", rank, worst, None, worst, EXACT, "padding rows must be zero")
        self.ledger.count("all_gather", _width(reference))
        self._compare(point, total, reference, kind="gather")
        return [[value] for value in self._forced(tag, reference, total, len(arrivals), shared=True)]

    def _needs_sum(self, point: Point, tag: str, arrivals: list[Arrival]) -> list[Any]:
        results: list[list[Any]] = [[] for _ in arrivals]
        for number, reference in enumerate(arrivals[0].values):
            total = torch.zeros_like(reference)
            owned = torch.zeros(reference.shape[-1], dtype=torch.bool)
            for rank, arrival in enumerate(arrivals[1:]):
                value = arrival.values[number]
                runs = spans(arrival.parts.runs(0)) if arrival.parts is not None else []
                index = torch.cat([torch.arange(i, i + n) for _, i, n in runs]) if runs else torch.arange(0)
                self._compare(point, value[..., index], reference[..., index], kind="gather", rank=rank)
                first = index[~owned[index]]
                total[..., first] = value[..., first]
                owned[index] = True
            self._compare(point, total, reference, kind="gather")
            for row, value in zip(
                results, self._forced(f"{tag}/{number}", reference, total, len(arrivals)), strict=True
            ):
                row.append(value)
        self.ledger.count("norm_all_reduce", 1)
        return results

    def _replicated(self, point: Point, tag: str, arrivals: list[Arrival]) -> list[Any]:
        seen, *outs = arrivals[0].values
        partial = [self._empty_rows(seen, arrival.values[0]) for arrival in arrivals[1:]]
        if any(mask is not None for mask in partial):
            for rank, (mask, arrival) in enumerate(zip(partial, arrivals[1:], strict=True)):
                for found, expected in zip(arrival.values[1:], outs, strict=True):
                    if torch.is_tensor(expected):
                        if mask is not None:
                            found, expected = found * ~mask, expected * ~mask
                        self._compare(point, found, expected, kind="replicated", rank=rank, keep=True)
            return [arrival.values[1:] for arrival in arrivals]
        single = len(outs) == 1
        results: list[list[Any]] = [[] for _ in arrivals]
        for number, expected in enumerate(outs):
            founds = [arrival.values[number + 1] for arrival in arrivals[1:]]
            if not torch.is_tensor(expected):
                values = [expected, *founds]
            else:
                for rank, found in enumerate(founds):
                    self._compare(point, found, expected, kind="replicated", rank=rank, keep=True)
                values = self._put_in_place(f"{tag}/{number}", expected, founds, probe=single)
            for row, value in zip(results, values, strict=True):
                row.append(value)
        self._narrowed = False
        return results

    def _end(self, arrivals: list[Arrival]) -> list[Any]:
        reference = arrivals[0].values[0]
        self.is_causal = arrivals[0].kind == "logits"
        shares = self.batch.parts(reference)
        point = Point(arrivals[0].kind if arrivals[0].kind == "logits" else "last_hidden_state", "logits")
        for rank, arrival in enumerate(arrivals[1:]):
            found = arrival.values[0]
            if found.shape != reference.shape:
                self.add(point, "logits", rank, math.inf, None, math.inf, self._gate(point, None), "another shape")
                continue
            if shares is None:
                self._compare(point, found, reference, kind="logits", rank=rank, keep=True)
                continue
            self._compare(point, found, reference, kind="logits", rank=rank, keep=True)
            if rank == 0:
                self.outputs = reference[shares.main].clone(), found[shares.free].clone()
        self._narrowed = False
        return [None] * len(arrivals)

    # -- numbers --------------------------------------------------------------------------------

    def _empty_rows(self, reference: Any, found: Any) -> torch.Tensor | None:
        """Which vectors of the last dimension a rank has nothing of, where the reference has something."""
        if not torch.is_tensor(reference) or not reference.is_floating_point() or found.shape != reference.shape:
            return None
        nothing = (found == 0).all(-1, keepdim=True) & (reference != 0).any(-1, keepdim=True)
        return nothing if bool(nothing.any()) else None

    def _gate(self, point: Point, noise: float | None) -> float:
        """The default gate or the caller's; the default is widened where the reference itself amplifies differences."""
        usual = BASE[self.compute]
        if self.compute == torch.float64 and self._narrowed:
            usual = NARROWED
        gate = self.gate_of(point.path, usual)
        if gate != usual:
            return gate
        if self.fine and usual == BASE[torch.float64]:
            gate = FINE
        if noise is not None and math.isfinite(noise):
            amplified = noise / (self.batch.ulp / math.sqrt(3))
            gate *= max(1.0, amplified / AMPLIFIED.get(gate, 10.0))
        return gate

    def _compare(
        self,
        point: Point,
        found: torch.Tensor,
        expected: torch.Tensor,
        kind: str = "sum",
        rank: int | None = None,
        keep: bool = False,
    ) -> None:
        """Add the measures of one tensor, a part of the batch at a time."""
        shares = self.batch.parts(expected)
        if found.shape != expected.shape:
            self.add(
                point,
                kind,
                rank,
                math.inf,
                None,
                math.inf,
                self._gate(point, None),
                f"shape {list(found.shape)} where the original has {list(expected.shape)}",
            )
            return
        if shares is None:
            gap = _largest(found, expected)
            self.add(point, kind, rank, relative(found, expected), None, gap, self._gate(point, None))
            return
        main = expected[shares.main]
        noise = relative(expected[shares.free], main) if expected.is_floating_point() else None
        gate = self._gate(point, noise)
        free = relative(found[shares.free], main)
        self.add(point, kind, rank, relative(found[shares.main], main), free, _largest(found[shares.main], main), gate)
        error = relative(found[shares.probe], expected[shares.probe])
        self.add(
            point, "probe", rank, error, None, _largest(found[shares.probe], expected[shares.probe]), gate, f"of {kind}"
        )

    def add(
        self,
        point: Point,
        kind: str,
        rank: int | None,
        error: float,
        free: float | None,
        gap: float,
        gate: float,
        note: str = "",
    ) -> None:
        """Add one measure and judge it."""
        status = "pass" if within(error, gate) else "fail"
        self.ledger.measures.append(Measure(point.path, point.block, kind, rank, error, free, gap, gate, status, note))

    # -- what everyone goes on with -------------------------------------------------------------

    def _forced(
        self, tag: str, reference: torch.Tensor, total: torch.Tensor, count: int, shared: bool = False
    ) -> list[torch.Tensor]:
        """The reference's tensor, and the ranks': the reference's main rows, their own free ones, a probe's noise."""
        self._narrowed = False
        shares = self.batch.parts(reference)
        if shares is None or total.shape != reference.shape:
            return [reference.clone() for _ in range(count)]
        mine, theirs = reference, total
        noise = self.batch.gaussian(tag, reference[shares.probe], reference[shares.main])
        theirs[shares.main] = reference[shares.main]
        mine[shares.free] = self.batch.moved(tag, reference[shares.main])
        mine[shares.probe] = noise
        theirs[shares.probe] = noise
        return [mine, *(theirs if shared else theirs.clone() for _ in range(count - 1))]

    def _put_in_place(self, tag: str, reference: torch.Tensor, founds: list[torch.Tensor], probe: bool) -> list[Any]:
        """As :meth:`_forced` for what every rank has whole: each keeps its own free rows."""
        shares = self.batch.parts(reference)
        if shares is None:
            return [reference.clone() for _ in range(len(founds) + 1)]
        float_like = reference.is_floating_point()
        mine = reference.clone()
        if probe and float_like:
            mine[shares.probe] = self.batch.gaussian(tag, reference[shares.probe], reference[shares.main])
        mine[shares.free] = self.batch.moved(tag, mine[shares.main]) if probe and float_like else mine[shares.main]
        out = [mine]
        for found in founds:
            if found.shape != reference.shape:
                out.append(reference.clone())
                continue
            own = found.clone()
            own[shares.main] = mine[shares.main]
            own[shares.probe] = mine[shares.probe]
            out.append(own)
        return out


def _width(tensor: torch.Tensor) -> int:
    return int(tensor.shape[-1]) if tensor.dim() else 1


def _largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return float((found != expected).any())
    value = float((found - expected).abs().max())
    return value if math.isfinite(value) else math.inf
