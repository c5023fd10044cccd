"""Faults of the embedding, the head, padding and learned positions."""

from __future__ import annotations

from .catalogue import Expected, module, mutant
from .scratch import NotHereError, Scratch
from .tensors import column, exchange, flipped


def tables(s: Scratch, role: str) -> tuple[str, Expected]:
    """The embedding or the head, and where its faults show: at both where they are one tensor."""
    name = s.last(role)
    points = list(module(name).points)
    points += [alias.rpartition(".")[0] for alias, target in s.manifest.aliases.items() if target == name]
    return name, Expected(tuple(points))


def shifted(s: Scratch, role: str) -> Expected:
    name, expected = tables(s, role)
    whole = s.whole(name)
    for rank in s.ranks():
        rows = s.get(name, rank)
        for at, index in enumerate(s.runs(name, rank, 0)):
            if index >= 0:
                rows[at] = whole[(index + 1) % len(whole)]
        s.put(name, rank, rows)
    return expected


@mutant("embedding rows off by one")
def embedding_off(s: Scratch) -> Expected:
    """All rows of the embedding moved on by one token"""
    return shifted(s, "embed")


@mutant("head rows off by one")
def head_off(s: Scratch) -> Expected:
    """All rows of the head moved on by one token"""
    return shifted(s, "head")


@mutant("embedding row zero")
def embedding_row(s: Scratch) -> Expected:
    """One row of the embedding zero"""
    name, expected = tables(s, "embed")
    s.change(name, 1, lambda t: column(t, 0, [5], 0.0))
    return expected


@mutant("head row x 1.02")
def head_row(s: Scratch) -> Expected:
    """One row of the head 2% too large"""
    name, expected = tables(s, "head")
    s.change(name, 0, lambda t: column(t, 0, [7], 1.02))
    return expected


@mutant("two head rows exchanged")
def head_rows(s: Scratch) -> Expected:
    """Two rows of the head exchanged on one rank"""
    name, expected = tables(s, "head")
    s.change(name, 1, lambda t: t[[1, 0, *range(2, len(t))]])
    return expected


@mutant("one bit in a rarely used row")
def rare_bit(s: Scratch) -> Expected:
    """The lowest bit of one element of one row of the embedding flipped"""
    name, expected = tables(s, "embed")

    def by(tensor):  # type: ignore[no-untyped-def]
        tensor[9] = flipped(tensor[9], 0)
        return tensor

    s.change(name, 1, by)
    return expected


@mutant("embedding of two ranks exchanged")
def embedding_ranks(s: Scratch) -> Expected:
    """The embedding rows of two ranks exchanged"""
    name, expected = tables(s, "embed")
    exchange(s, [name])
    return expected


@mutant("head of two ranks exchanged")
def head_ranks(s: Scratch) -> Expected:
    """The head rows of two ranks exchanged"""
    name, expected = tables(s, "head")
    exchange(s, [name])
    return expected


def _padding(s: Scratch, role: str) -> Expected:
    name, expected = tables(s, role)
    for rank in s.ranks():
        for at, index in enumerate(s.runs(name, rank, 0)):
            if index < 0:
                s.change(name, rank, lambda t, at=at: t.index_fill(0, _one(at), 0.5))  # type: ignore[misc]
                return expected
    raise NotHereError("no padding at this degree")


def _one(at: int):  # type: ignore[no-untyped-def]
    import torch

    return torch.tensor([at])


@mutant("padding row of the embedding not zero")
def embedding_padding(s: Scratch) -> Expected:
    """A padding row of the embedding not zero"""
    return _padding(s, "embed")


@mutant("padding row of the head not zero")
def head_padding(s: Scratch) -> Expected:
    """A padding row of the head not zero"""
    return _padding(s, "head")


@mutant("positions off by one on one rank")
def positions_off(s: Scratch) -> Expected:
    """Learned positions moved on by one on one rank"""
    name = s.last("position")
    s.change(name, 1, lambda t: t.roll(-1, 0))
    return Expected(module(name).points, 1)


@mutant("a far position zero on every rank")
def position_zero(s: Scratch) -> Expected:
    """The row of a late position zero on all ranks"""
    name = s.last("position")
    for rank in s.ranks():
        s.change(name, rank, lambda t: column(t, 0, [t.shape[0] - 2], 0.0))
    return module(name)
