"""Holds the gradients of ranks against the original's, element by element, whatever joined or placed them.

Every element of every tensor on disk gets a number, and the numbers are sent the way of the weights: through
the cut, through transformers' conversions, into the parameters. So each element of a rank's gradient knows
of which element of the original's it is (-1: padding, or not held).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .skeleton import Recipe, Skeleton
from .stores import Part
from .ways import LOCAL

FLOOR = 1e-4  # of the usual gradient: what is smaller is analytically zero (the bias of a key), and its noise is not


@dataclass
class Comparison:
    """One parameter: relative L2 error of the gradient, and how ranks hold it.

    ``kind``: ``sharded``; ``replicated`` (every rank has all of it); ``partial`` (whole on every rank, but the
    gradients have to be summed over ranks). ``alone`` is the error of the worst rank by itself where several
    ranks hold copies of one element, None where none do.
    """

    parameter: str
    kind: str
    error: float
    max_abs: float
    alone: float | None


def numbered(shapes: Mapping[str, tuple[int, ...]], name: str) -> torch.Tensor:
    """The numbers of a tensor's elements; exact in float64, which conversions leave alone."""
    shape = shapes[name]
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


def rank_numbers(part: Part, mode: str, shapes: Mapping[str, tuple[int, ...]], name: str) -> torch.Tensor:
    """The numbers of what a rank holds: in its stored shape, or at full size; -1 elsewhere."""
    whole = numbered(shapes, name)
    local = whole
    for dim in range(len(part.full_shape)):
        index = torch.cat(
            [
                torch.arange(run.start, run.start + run.length) if run.start >= 0 else torch.full((run.length,), -1)
                for run in part.runs(dim)
            ]
        )
        local = local.index_select(dim, index.clamp_min(0))
        pad = (index < 0).view([-1 if d == dim else 1 for d in range(local.dim())])
        local = local.masked_fill(pad, -1)
    if mode == LOCAL:
        return local
    out = torch.full_like(whole, -1)
    held = local[local >= 0].long()
    out.view(-1)[held] = held.to(out.dtype)
    return out


class Gradients:
    """The original's gradients by element.

    Args:
        reference: gradient of every parameter of the original, by name; None where none came.
    """

    def __init__(
        self, skeleton: Skeleton, shapes: Mapping[str, tuple[int, ...]], reference: Mapping[str, torch.Tensor | None]
    ) -> None:
        self._skeleton, self._shapes, self._reference = skeleton, shapes, reference
        squares, count = 0.0, 0
        for gradient in reference.values():
            if gradient is not None:
                squares += float(gradient.double().pow(2).sum())
                count += gradient.numel()
        self.usual = math.sqrt(squares / count) if count else 0.0

    def compare(
        self,
        recipe: Recipe,
        parts: Sequence[Mapping[str, Part]],
        mode: str,
        ranks: Sequence[Callable[[str], torch.Tensor | None]],
    ) -> list[Comparison]:
        """Compare the parameters that one recipe makes; ``ranks`` give each rank's gradient by parameter."""
        numbers = self._made(recipe, lambda name: numbered(self._shapes, name))
        of_rank = [self._made(recipe, partial(self._own, own, mode)) for own in parts]
        whole = all(own[name].cut.is_whole for own in parts for name, _ in recipe.tensors if name in own)
        out = []
        for target in recipe.targets:
            expected = self._reference.get(target)
            if expected is None:
                continue
            place = torch.full((int(max(n.max() for n in numbers.values())) + 1,), -1)
            flat = numbers[target].flatten().long()
            place[flat] = torch.arange(len(flat))
            out.append(self._one(target, expected.flatten(), place, [m[target] for m in of_rank], ranks, whole))
        return out

    def noise(self, others: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
        """By how much other gradients of the original differ, by parameter; as errors of ranks are measured."""
        return {
            name: self._error(other, gradient)[0]
            for name, gradient in self._reference.items()
            if gradient is not None and (other := others.get(name)) is not None
        }

    def _made(self, recipe: Recipe, fetch: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        offsets, at = {}, 0
        for name, _ in recipe.tensors:
            offsets[name] = at
            at += math.prod(self._shapes[name])

        def shifted(name: str) -> torch.Tensor:
            found = fetch(name)
            return torch.where(found >= 0, found + offsets[name], found)

        return recipe.make(self._skeleton.model, shifted)

    def _own(self, parts: Mapping[str, Part], mode: str, name: str) -> torch.Tensor:
        part = parts.get(name)
        return (
            rank_numbers(part, mode, self._shapes, name) if part is not None else torch.full(self._shapes[name], -1.0)
        )

    def _one(
        self,
        target: str,
        expected: torch.Tensor,
        place: torch.Tensor,
        numbers: Sequence[torch.Tensor],
        ranks: Sequence[Callable[[str], torch.Tensor | None]],
        whole: bool,
    ) -> Comparison:
        total = torch.zeros_like(expected)
        holders = torch.zeros(len(expected), dtype=torch.long)
        alone: list[float] = []
        stray = 0.0
        for numbered_rank, gradient_of in zip(numbers, ranks, strict=True):
            gradient = gradient_of(target)
            ids = numbered_rank.flatten().long()
            held = ids >= 0
            found = torch.zeros(len(ids), dtype=expected.dtype) if gradient is None else gradient.flatten()
            where = place[ids[held]]
            total.index_add_(0, where, found[held])
            holders.index_add_(0, where, torch.ones(len(where), dtype=torch.long))
            alone.append(self._error(found[held], expected[where])[0])
            if len(ids) != len(expected) and not bool(held.all()):
                stray = max(stray, float(found[~held].abs().max()))  # padding: nothing may depend on it
        summed, gap = self._error(total, expected)
        copies = bool((holders > 1).any())
        if bool((holders == 0).any()) and self._error(torch.zeros_like(expected), expected)[0]:
            missing = (holders == 0) & (expected != 0)
            summed = math.inf if bool(missing.any()) else summed
        worst = max(alone)
        if whole and worst <= summed:
            return Comparison(
                target, "replicated", worst, gap if len(ranks) == 1 else worst * self._size(expected), None
            )
        error = summed if not stray else math.inf
        return Comparison(target, "partial" if whole else "sharded", error, gap, worst if copies else None)

    def _size(self, expected: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(expected.double()))

    def _error(self, found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
        """Relative L2 error, and the largest difference."""
        if not expected.numel():
            return 0.0, 0.0
        gap = found.double() - expected.double()
        floor = FLOOR * self.usual * math.sqrt(expected.numel())
        size = max(self._size(expected), floor)
        error = float(torch.linalg.vector_norm(gap)) / size if size else float(bool(gap.any())) and math.inf
        return (error if math.isfinite(error) else math.inf), float(gap.abs().max())
