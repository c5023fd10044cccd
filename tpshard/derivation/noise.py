"""Each axis put to the test by noise: what a rank adds to a sum depends on what it holds and on nothing else.

For every rank of a few the model runs once with noise in place of all that the rank lacks, and once with noise in
all that it holds. The channels of its own at every sum must not change the first time and must change the
second. At sums and spanning norms it is given what the other ranks would give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tpshard.intervals import dealt

from .probe import Probe
from .products import Lookup, Product, Products
from .reach import Sum
from .structure import AxisFound, Structure
from .sums import Meeting

SAME, OTHER = 1e-6, 1e-6  # relative: float32 inside some models, and what noise must do at least
RANKS = 2


@dataclass
class Experiments:
    """How many channels' worth of comparisons were made, and the axes that failed, with the reason."""

    made: int = 0
    failed: dict[frozenset[str], str] = field(default_factory=dict)


@dataclass
class _Record:
    """The model's own run: what went into each sum and norm, and what came of it, visit by visit."""

    inputs: dict[Sum, list[torch.Tensor]] = field(default_factory=dict)
    results: dict[Sum, list[torch.Tensor]] = field(default_factory=dict)
    normed: dict[str, list[list[torch.Tensor]]] = field(default_factory=dict)


def experiments(probe: Probe, met: Meeting, found: Structure, ranks: int = RANKS) -> Experiments:
    """Try every axis, all of one model in the same runs."""
    out = Experiments()
    axes = [axis for axis in found.axes if axis.groups > 1 or axis.units > 1]
    if not axes:
        return out
    with torch.no_grad():
        record = _Record()
        _run(probe, met, lambda at, visit, x: None, record, None)
        for rank in range(ranks):
            held = _held(probe, axes, ranks, rank)
            own = {at: _own(axis, at, ranks, rank) for axis in axes for at in axis.channels}
            norms = _own_of_norms(probe, met, held)
            inner = _ends(probe, axes)
            for lacking in (True, False):
                mask = ~held if lacking else held & ~inner
                changes: dict[Sum, float] = {}

                def compare(
                    at: Sum, visit: int, x: torch.Tensor, own: dict[Sum, torch.Tensor] = own,
                    changes: dict[Sum, float] = changes,
                ) -> None:  # fmt: skip
                    if at in own and bool(own[at].any()):
                        expected = record.inputs[at][visit][..., own[at]]
                        size = float(expected.norm())
                        gap = float((x[..., own[at]] - expected).norm()) / size if size else 0.0
                        changes[at] = max(changes.get(at, 0.0), gap)

                with _noise(probe, mask, rank):
                    _run(probe, met, compare, record, norms)
                for axis in axes:
                    for at in axis.channels:
                        gap = changes.get(at)
                        if gap is None:
                            continue
                        out.made += 1
                        if lacking and not gap <= SAME:
                            out.failed[axis.sums] = (
                                f"noise in what rank {rank} of {ranks} lacks changed what it adds at {at.parameter} "
                                f"by {gap:.1e}"
                            )
                        elif not lacking and not gap > OTHER:
                            out.failed[axis.sums] = (
                                f"noise in what rank {rank} of {ranks} holds changed nothing of what it adds at "
                                f"{at.parameter}"
                            )
    return out


def _dealt(axis: AxisFound, ranks: int, rank: int) -> set[int]:
    """The units of a rank: whole groups where there are enough."""
    if axis.groups >= ranks:
        start, stop = dealt(axis.groups, ranks)[rank]
        return {unit for unit, group in enumerate(axis.group_of) if start <= group < stop}
    start, stop = dealt(axis.units, ranks)[rank]
    return set(range(start, stop))


def _own(axis: AxisFound, at: Sum, ranks: int, rank: int) -> torch.Tensor:
    units = _dealt(axis, ranks, rank)
    return torch.tensor([unit in units for unit in axis.channels[at]])


def _held(probe: Probe, axes: list[AxisFound], ranks: int, rank: int) -> torch.Tensor:
    """Which elements on disk the rank holds, as one mask of all of them."""
    held = torch.ones(probe.elements, dtype=torch.bool)
    for axis in axes:
        units = _dealt(axis, ranks, rank)
        groups = {axis.group_of[unit] for unit in units}
        for name, (dim, labels) in axis.tensors.items():
            keep = torch.tensor(
                [
                    kind == "whole" or (number in units if kind == "unit" else number in groups)
                    for kind, number in labels
                ]
            )
            part = probe.of_tensor(held, name)
            part &= keep.view(-1, *[1] * (part.dim() - dim - 1))
    return held


def _ends(probe: Probe, axes: list[AxisFound]) -> torch.Tensor:
    """Elements of what is not cut, and of the products at the sums themselves: noise there tells nothing."""
    kept = torch.ones(probe.elements, dtype=torch.bool)
    for axis in axes:
        for name in axis.tensors:
            if name not in axis.ends:
                probe.of_tensor(kept, name).fill_(False)
    return kept


@contextmanager
def _noise(probe: Probe, mask: torch.Tensor, seed: int) -> Iterator[None]:
    """Noise of each parameter's own size where the mask says, for a while."""
    chance = torch.Generator().manual_seed(900 + seed)
    before: dict[str, torch.Tensor] = {}
    for name, parameter in probe.parameters.items():
        if name not in probe.origin:
            continue
        where = mask[probe.origin[name]]
        if bool(where.any()):
            before[name] = parameter.data.clone()
            size = parameter.data.std() if parameter.numel() > 1 else parameter.data.abs()
            drawn = torch.randn(parameter.shape, generator=chance, dtype=torch.float64) * size.clamp_min(0.1)
            parameter.data.copy_(torch.where(where, drawn, parameter.data))
    try:
        yield
    finally:
        for name, value in before.items():
            probe.parameters[name].data.copy_(value)


def _own_of_norms(probe: Probe, met: Meeting, held: torch.Tensor) -> dict[str, torch.Tensor]:
    """Which channels of every spanning norm are the rank's own."""
    out = {}
    for path in met.spanning:
        name = next((n for n in probe.origin if n.rpartition(".")[0] == path), None)
        if name is not None:
            out[path] = held[probe.origin[name]]
    return out


def _run(
    probe: Probe,
    met: Meeting,
    compare: Callable[[Sum, int, torch.Tensor], None],
    record: _Record,
    norms: dict[str, torch.Tensor] | None,
) -> None:
    """One run: recorded where ``norms`` is None, else compared with what was recorded, and given its results."""
    visits: dict[object, int] = {}

    def product(found: Product, again: Callable[[torch.Tensor], torch.Tensor], result: torch.Tensor) -> Any:
        at = Sum(found.parameter, found.contracted)
        if at not in met.sums:
            return None
        if norms is None:
            record.inputs.setdefault(at, []).append(found.x.clone())
            record.results.setdefault(at, []).append(result.clone())
            return None
        visit = visits[at] = visits.get(at, -1) + 1
        compare(at, visit, found.x)
        return record.results[at][visit].clone()

    def before(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            values = [v for v in args if torch.is_tensor(v)]
            if norms is None:
                record.normed.setdefault(path, []).append([v.clone() for v in values])
                return None
            visit = visits[path] = visits.get(path, -1) + 1
            own = norms.get(path)
            if own is None:
                return None
            given = iter(record.normed[path][visit])
            return tuple(torch.where(own, v, next(given)) if torch.is_tensor(v) else v for v in args)

        return hook

    def looked_up(found: Lookup, result: torch.Tensor) -> None:
        return None

    handles = [probe.modules[path].register_forward_pre_hook(before(path)) for path in met.spanning]
    try:
        with Products(probe.parameters, product, looked_up):
            probe.run()
    finally:
        for handle in handles:
            handle.remove()
