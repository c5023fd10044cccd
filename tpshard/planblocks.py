"""The blocks of a layer: a layer with self and cross attention has two, each with a sum of its own at its end."""

from __future__ import annotations

from collections.abc import Sequence

from .planparts import Member
from .roles import Part


def blocks_of(part: Part, members: Sequence[Member]) -> list[list[Member]]:
    """The members of one kind of part in one layer, by the block that they are of.

    A block is the smallest module around a row-parallel matrix that holds a column-parallel one as well. Where
    such modules lie in each other, the matrices' axes tell the blocks apart, and where those are one, the layer
    is one block. Values of single units that lie in no block go with the first along their axis.
    """
    outs = [m for m in members if m.role in part.outs]
    if len(outs) < 2:
        return [list(members)]
    roots = [_root(part, members, out) for out in outs]
    if any(a.startswith(b) for n, a in enumerate(roots) for k, b in enumerate(roots) if n != k):
        return _by_axis(outs, members)
    blocks = [[m for m in members if m.name.startswith(root)] for root in roots]
    for member in members:
        if not any(member.name.startswith(root) for root in roots):
            axes = _axes(member)
            next((block for block in blocks if any(axes & _axes(m) for m in block)), blocks[0]).append(member)
    return blocks


def _root(part: Part, members: Sequence[Member], out: Member) -> str:
    """The smallest module around ``out`` with a maker of what it takes, as the beginning of its names."""
    path = out.name
    while path:
        path = path.rpartition(".")[0]
        around = f"{path}." if path else ""
        if any(m.role in part.ins and m.name.startswith(around) for m in members):
            return around
    return ""


def _by_axis(outs: Sequence[Member], members: Sequence[Member]) -> list[list[Member]]:
    kinds = list(dict.fromkeys(frozenset(_axes(out)) for out in outs))
    if len(kinds) < len(outs) or any(a & b for n, a in enumerate(kinds) for b in kinds[:n]):
        return [list(members)]
    blocks: list[list[Member]] = [[] for _ in kinds]
    for member in members:
        at = next((n for n, kind in enumerate(kinds) if kind & _axes(member)), 0)
        blocks[at].append(member)
    return blocks


def _axes(member: Member) -> set[object]:
    return {axis for _, cut in member.cuts for axis in cut.axes}
