"""Puts the ranks' tensors together at a point, compares, and says with what everyone goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
NARROWED = 1e-7  # a float64 run that goes through float32 inside, and the most that any gate of float64 is widened to
OF_NOISE = 100.0  # times the reference's own noise at a point, which a float64 gate allows where that is more
FREE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 3e-2}
AMPLIFIED = 10.0  # how much a sublayer may amplify in a narrower dtype before its gate is widened
EXACT = 0.0


def _is_float32(values: torch.Tensor) -> bool:
    """Whether all values are float32's, whatever they are stored in."""
    return values.is_floating_point() and bool((values == values.float().to(values.dtype)).all())


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
        broken: tensors of the source in which NaN or Inf has been read so far. Where there are any, elements that
            are not finite in the reference are left out of comparisons, and everyone goes on with 0 in their place.
    """

    def __init__(
        self,
        points: Mapping[str, Point],
        batch: Batch,
        compute: torch.dtype,
        gate_of: Callable[[str, float], float] = lambda point, gate: gate,
        fine: bool = False,
        broken: Mapping[str, None] | None = None,
    ) -> None:
        self.points, self.batch, self.compute, self.gate_of = points, batch, compute, gate_of
        self.fine = fine
        self.broken: Mapping[str, None] = broken if broken is not None else {}
        self.left_out: dict[str, None] = {}  # points at which the reference is not finite
        self.ledger = Ledger()
        self.outputs: tuple[torch.Tensor, torch.Tensor] | None = None  # reference's and ranks' free rows
        self.is_causal = False  # whether the model gave logits
        self._visits: dict[str, int] = {}
        self._lengths: dict[str, set[int]] = {}  # of a point's tensors, along their first dimension
        self._narrowed = False

    own_shapes = False  # whether ranks compute in other shapes than the reference

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
        owned = torch.zeros(reference.shape[-1], dtype=torch.bool)
        for rank, arrival in enumerate(arrivals[1:]):
            value: torch.Tensor = arrival.values[0]
            if point.repeats:
                value = self._without_copies(point, rank, arrival, reference, owned)
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
        self._once(point, arrivals[1:], total, reference)
        self.ledger.count("all_gather", _width(reference))
        self._compare(point, total, reference, kind="gather")
        return [[value] for value in self._forced(tag, reference, total, len(arrivals), shared=True)]

    def _once(self, point: Point, arrivals: list[Arrival], total: torch.Tensor, reference: torch.Tensor) -> None:
        """Count once in ``total`` what every rank makes of itself beside its part (rows for a few added tokens)."""
        shared = torch.ones(reference.shape[-1], dtype=torch.bool)
        for arrival in arrivals:
            if arrival.parts is None or arrival.values[0].shape != reference.shape:
                return
            for _, index, length in spans(arrival.parts.runs(0)):
                shared[index : index + length] = False
        if shared.any():
            for rank, arrival in enumerate(arrivals):
                value = arrival.values[0][..., shared]
                self._compare(point, value, reference[..., shared], kind="gather", rank=rank)
            total[..., shared] = arrivals[0].values[0][..., shared]

    def _without_copies(
        self, point: Point, rank: int, arrival: Arrival, reference: torch.Tensor, owned: torch.Tensor
    ) -> torch.Tensor:
        """What a rank brings to a gather, zero where an earlier rank has brought it (copies of a KV head).

        Copies are compared with the reference by themselves; ``owned`` is brought up to date.
        """
        value: torch.Tensor = arrival.values[0]
        if arrival.parts is None:
            return value
        padded = value.shape == reference.shape and arrival.parts.shape[0] != value.shape[-1]
        for at, index, stored in spans(arrival.parts.runs(0)):
            length = max(0, min(stored, len(owned) - index))  # some models leave off rows that only pad the vocabulary
            copies = torch.arange(length)[owned[index : index + length]]
            if len(copies):
                places = copies + (index if padded else at)
                self._compare(point, value[..., places], reference[..., copies + index], kind="gather", rank=rank)
                value = value.clone()
                value[..., places] = 0
            owned[index : index + length] = True
        return value

    def _needs_sum(self, point: Point, tag: str, arrivals: list[Arrival]) -> list[Any]:
        results: list[list[Any]] = [[] for _ in arrivals]
        for number, reference in enumerate(arrivals[0].values):
            total = torch.zeros_like(reference)
            owned = torch.zeros(reference.shape[-1], dtype=torch.bool)
            for rank, arrival in enumerate(arrivals[1:]):
                value = arrival.values[number]
                runs = spans(arrival.parts.runs(-1)) if arrival.parts is not None else []
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
        lengths = self._lengths.setdefault(point.path, set())
        lengths.update(int(v.shape[0]) for v in outs if torch.is_tensor(v) and v.dim())
        if len(lengths) > 1:  # not rows of the batch: a loop over them calls this, and shows in what comes after
            return [arrival.values[1:] for arrival in arrivals]
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
        self.is_causal = arrivals[0].kind == "logits"
        for number, reference in enumerate(arrivals[0].values):
            name = ("logits" if self.is_causal else "last_hidden_state") if not number else f"output {number}"
            point, shares = Point(name, "logits"), self.batch.parts(reference)
            for rank, arrival in enumerate(arrivals[1:]):
                found = arrival.values[number] if number < len(arrival.values) else None
                if found is None or found.shape != reference.shape:
                    self.add(point, "logits", rank, math.inf, None, math.inf, self._gate(point, None), "another shape")
                    continue
                self._compare(point, found, reference, kind="logits", rank=rank, keep=True)
                if rank == number == 0 and shares is not None:
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

    def _gate(self, point: Point, noise: float | None, errors: Sequence[float] = (), rounded: bool = False) -> float:
        """The default gate or the caller's; the default is widened where the reference itself is that noisy.

        Behind a cast to float32 one element in 2**29 is rounded the other way by a difference in the last place of
        float64. By chance that shows in one of the ``errors``, hardly in all: only then the wide gate applies.
        Where ranks compute in shapes of their own, float32 kernels may give all elements another last place; and
        where what comes to the point is itself ``rounded`` to float32, every rank's share is, before the sum.
        """
        narrowed = self.compute == torch.float64 and self._narrowed
        usual = NARROWED if narrowed else BASE[self.compute]
        gate = self.gate_of(point.path, usual)
        if gate != usual:
            return gate
        known = noise if noise is not None and math.isfinite(noise) else 0.0
        if self.compute != torch.float64:
            return gate * max(1.0, known / (self.batch.ulp / math.sqrt(3)) / AMPLIFIED)
        gate = min(max(FINE if self.fine else BASE[torch.float64], OF_NOISE * known), NARROWED)
        if not narrowed or not errors or max(errors) <= gate:
            return gate
        return NARROWED if self.own_shapes or rounded or min(errors) <= gate else gate

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
            note = f"shape {list(found.shape)} where the original has {list(expected.shape)}"
            self.add(point, kind, rank, math.inf, None, math.inf, self._gate(point, None), note)
            return
        if self.broken and expected.is_floating_point():
            finite = torch.isfinite(expected)
            if not bool(finite.all()):
                self.left_out[point.path] = None
                if shares is not None:  # the free rows' difference from the main ones is the noise
                    finite[shares.main] &= finite[shares.free]
                    finite[shares.free] = finite[shares.main]
                expected, found = expected.where(finite, 0.0), found.where(finite, 0.0)
                if not bool(finite.any()):
                    return
        if shares is None:
            gap = _largest(found, expected)
            self.add(point, kind, rank, relative(found, expected), None, gap, self._gate(point, None))
            return
        main, probe = expected[shares.main], expected[shares.probe]
        noise = relative(expected[shares.free], main) if expected.is_floating_point() else None
        errors = relative(found[shares.main], main), relative(found[shares.probe], probe)
        free: float | None = relative(found[shares.free], main)
        if self.broken and not math.isfinite(free or 0.0):
            free = None
        gate = self._gate(point, noise, errors, self._narrowed and _is_float32(main))
        self.add(point, kind, rank, errors[0], free, _largest(found[shares.main], main), gate)
        self.add(point, "probe", rank, errors[1], None, _largest(found[shares.probe], probe), gate, f"of {kind}")

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
        reference, total = self._mended(reference), self._mended(total)
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

    def _mended(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` with 0 for NaN and Inf where the source has brought some: what comes after can be compared."""
        if not self.broken or not value.is_floating_point():
            return value
        return torch.nan_to_num(value, 0.0, 0.0, 0.0)

    def _put_in_place(self, tag: str, reference: torch.Tensor, founds: list[torch.Tensor], probe: bool) -> list[Any]:
        """As :meth:`_forced` for what every rank has whole: each keeps its own free rows."""
        shares = self.batch.parts(reference)
        if shares is None:
            return [self._mended(reference).clone() for _ in range(len(founds) + 1)]
        float_like = reference.is_floating_point()
        mine = self._mended(reference).clone()
        if probe and float_like:
            mine[shares.probe] = self.batch.gaussian(tag, reference[shares.probe], reference[shares.main])
        mine[shares.free] = self.batch.moved(tag, mine[shares.main]) if probe and float_like else mine[shares.main]
        out = [mine]
        for found in founds:
            if found.shape != reference.shape:
                out.append(reference.clone())
                continue
            own = self._mended(found).clone()
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
