"""What faults do to tensors: places along a dimension exchanged, permuted, scaled; bits flipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .scratch import NotHereError, Scratch, paired


def column(tensor: torch.Tensor, dim: int, places: Sequence[int], factor: float) -> torch.Tensor:
    """The tensor with some places of a dimension multiplied; 0.0 makes them zero."""
    out = tensor.clone()
    index = torch.tensor(list(places))
    part = out.index_select(dim, index)
    out.index_copy_(dim, index, torch.zeros_like(part) if factor == 0.0 else (part * factor).to(part.dtype))
    return out


def moved(tensor: torch.Tensor, dim: int, to: Sequence[int], whence: Sequence[int]) -> torch.Tensor:
    """The tensor with what is at ``whence`` put at ``to``."""
    out = tensor.clone()
    out.index_copy_(dim, torch.tensor(list(to)), tensor.index_select(dim, torch.tensor(list(whence))))
    return out


def swap_places(s: Scratch, name: str, rank: int, dim: int, a: Sequence[int], b: Sequence[int]) -> None:
    """Exchange two sets of places of a dimension."""
    if len(a) != len(b):
        raise NotHereError("they are of different lengths")
    s.change(name, rank, lambda t: moved(t, dim, [*a, *b], [*b, *a]))


def permuted(s: Scratch, name: str, rank: int, dim: int, to: Sequence[int], whence: Sequence[int]) -> None:
    """Put what is at ``whence`` at ``to``."""
    s.change(name, rank, lambda t: moved(t, dim, to, whence))


def exchange(s: Scratch, names: Sequence[str]) -> tuple[int, int]:
    """Exchange tensors between the first two ranks that have them in the same shapes and differ in them."""
    if not names:
        raise NotHereError("no such tensors")
    for a, b in paired(s.ranks()):
        held = [(s.get(name, a), s.get(name, b)) for name in names]
        if any(x.shape != y.shape for x, y in held) or all(torch.equal(x, y) for x, y in held):
            continue
        for name, (x, y) in zip(names, held, strict=True):
            s.put(name, a, y)
            s.put(name, b, x)
        return a, b
    raise NotHereError("no two ranks have them in the same shape")


def taken_from(
    s: Scratch,
    name: str,
    rank: int,
    other: int,
    mine: Mapping[int, list[int]],
    theirs: Mapping[int, list[int]],
    fresh: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Units of ``rank`` overwritten with those of ``other``, in order."""
    to = [at for places in mine.values() for at in places]
    whence = [at for places in theirs.values() for at in places]
    if len(to) != len(whence):
        raise NotHereError("the ranks have different numbers of units")
    dim = s.cut_dim(name)
    given = fresh[other] if fresh is not None else s.get(name, other)

    def by(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.clone()
        out.index_copy_(dim, torch.tensor(to), given.index_select(dim, torch.tensor(whence)))
        return out

    s.change(name, rank, by)


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    """One bit of the largest element flipped: bit 0 is the lowest, 15 the sign."""
    out = tensor.clone()
    raw = out.view(-1).view(torch.int16)
    at = int(tensor.flatten().abs().argmax())
    raw[at] = raw[at] ^ (1 << bit if bit < 15 else -(1 << 15))
    return out


def rolled(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor moved on by one place along a dimension."""
    return tensor.roll(-1, dim)
