"""Collectives of a tensor-parallel group, with gradients and counted: among threads or among processes.

Conjugate operators as in Megatron-LM: a *sum* leaves gradients alone, an *entry* into a column-parallel block
leaves values alone and sums gradients. Every sum runs over the ranks in order, so that all ranks get the
same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .lockstep import ThreadGroup

ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"


class Exchange(Protocol):
    """One rank's side of the group."""

    rank: int
    size: int
    tally: Tally

    def all_reduce(self, tensor: torch.Tensor, point: str) -> torch.Tensor:
        """The sum over ranks, as a new tensor."""
        ...

    def all_gather(self, tensor: torch.Tensor, point: str) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order; all have one shape."""
        ...


class Tally:
    """How many collectives there were, and how many elements they held (see :mod:`tpshard.traffic`)."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.elements: dict[str, int] = {}

    def add(self, way: str, kind: str, elements: int) -> None:
        key = f"{way} {kind}"
        self.counts[key] = self.counts.get(key, 0) + 1
        self.elements[way] = self.elements.get(way, 0) + elements


class ThreadExchange:
    """A rank that is a thread of a :class:`.lockstep.ThreadGroup` made with :func:`resolve`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank, self.size, self.tally, self._group = rank, group.size, Tally(), group

    def all_reduce(self, tensor: torch.Tensor, point: str) -> torch.Tensor:
        out: torch.Tensor = self._group.meet(self.rank, f"{ALL_REDUCE} {point}", tensor.detach())
        return out

    def all_gather(self, tensor: torch.Tensor, point: str) -> list[torch.Tensor]:
        out: list[torch.Tensor] = self._group.meet(self.rank, f"{ALL_GATHER} {point}", tensor.detach())
        return out


def resolve(point: str, payloads: list[Any]) -> Sequence[Any]:
    """What a thread group does at a point: gather, or sum in rank order."""
    if point.startswith(ALL_GATHER):
        return [list(payloads) for _ in payloads]
    if not point.startswith(ALL_REDUCE):
        return payloads
    total = payloads[0].clone()
    for payload in payloads[1:]:
        total += payload
    return [total, *(total.clone() for _ in payloads[1:])]


def summed(x: torch.Tensor, exchange: Exchange, point: str, width: int | None = None) -> torch.Tensor:
    """The sum over ranks; the gradient goes to every rank as it is. ``width`` elements of a position count, or all."""
    return _Sum.apply(x, exchange, point, x.shape[-1] if width is None else width)


def entered(x: torch.Tensor, exchange: Exchange, point: str, width: int | None = None) -> torch.Tensor:
    """The same values; their gradient is summed over ranks."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Entry.apply(x, exchange, point, x.shape[-1] if width is None else width)


def joined(x: torch.Tensor, exchange: Exchange, point: str, mask: torch.Tensor, width: int) -> torch.Tensor:
    """The sum over ranks of ``x * mask``, whose gradient is summed over ranks as well.

    ``width`` elements of a position count: an engine's norm exchanges its sum of squares, and not its inputs.
    """
    return summed(entered(x * mask, exchange, point, width), exchange, point, width)


def gathered(
    x: torch.Tensor, exchange: Exchange, point: str, places: Sequence[Sequence[tuple[int, int, int]]], width: int
) -> torch.Tensor:
    """Every rank's part of the last dimension put where it belongs; the gradient of a rank's own part is its own.

    Args:
        places: for every rank (position in its part, index in the whole, length) of what is not padding.
        width: length of the whole.
    """
    return _Gather.apply(x, exchange, point, places, width)


def positions(x: torch.Tensor) -> int:
    """How many vectors of the last dimension a tensor holds."""
    return math.prod(x.shape[:-1])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, point: str, width: int) -> torch.Tensor:
        exchange.tally.add("forward", ALL_REDUCE, positions(x) * width)
        return exchange.all_reduce(x, point)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0], None, None, None


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, point: str, width: int) -> torch.Tensor:
        ctx.exchange, ctx.point, ctx.width = exchange, point, width
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (g,) = cotangents
        ctx.exchange.tally.add("backward", ALL_REDUCE, positions(g) * ctx.width)
        return ctx.exchange.all_reduce(g, f"gradient of {ctx.point}"), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, point: str, places: Any, width: int) -> torch.Tensor:
        ctx.places, ctx.shape = places[exchange.rank], x.shape
        exchange.tally.add("forward", ALL_GATHER, positions(x) * width)
        longest = max((at + length for rows in places for at, _, length in rows), default=0)
        longest = max(longest, x.shape[-1])
        own = x if x.shape[-1] == longest else torch.nn.functional.pad(x, (0, longest - x.shape[-1]))
        out = x.new_zeros((*x.shape[:-1], width))
        for part, rows in zip(exchange.all_gather(own.contiguous(), point), places, strict=True):
            for at, index, length in rows:
                out[..., index : index + length] = part[..., at : at + length]
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (g,) = cotangents
        own = g.new_zeros(ctx.shape)
        for at, index, length in ctx.places:
            own[..., at : at + length] = g[..., index : index + length]
        return own, None, None, None, None
