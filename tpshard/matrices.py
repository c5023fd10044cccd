"""Copies inside a buffer, as byte matrices: rows of some length at a constant distance.

Positions are bytes from the start of the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .routing import Strip


class Move(NamedTuple):
    """Byte matrices of ``rows`` x ``length``; ``step`` leads from row to row, ``skip`` from matrix to matrix."""

    source: int
    target: int
    length: int
    rows: int
    source_step: int
    target_step: int
    matrices: int
    source_skip: int
    target_skip: int


class Clear(NamedTuple):
    """A byte matrix of the buffer that is set to zero."""

    pos: int
    length: int
    rows: int
    step: int


class Strand(NamedTuple):
    """Columns of a target: ``length`` bytes at ``pos`` of the buffer (-1: zeros), ``step`` further for the next row."""

    pos: int
    length: int
    step: int


Run = tuple[int, int, int]  # from, to and length of a copy that is contiguous on both ends


class Moves(NamedTuple):
    """What happens inside the buffer; shared by all tiles of one geometry.

    ``rows`` and ``strands`` say the same as the moves and clears, store by store: a target's row is
    its strands one after the other. They are there for tiles of several rows only.
    """

    clears: Sequence[Clear]
    runs: Sequence[Run]
    moves: Sequence[Move]
    rows: int = 0
    strands: tuple[tuple[Strand, ...], ...] = ()


def row_moves(strip: Strip, rows: int, starts: Sequence[int], ends: Sequence[int]) -> list[Move]:
    """Return the copies of a strip as matrices in the buffer.

    ``starts`` and ``ends`` are where row 0 of each source and target lies. Equal matrices that follow
    each other at a constant distance on both ends become one move: an even cut is one for all ranks.
    """
    sources, targets = strip.sources, strip.targets
    moves = []
    last: Move | None = None  # the one that grows
    count = next_source = next_target = 0
    for source, source_at, target, target_at, length in strip.route.copies:
        begin, end = starts[source] + source_at, ends[target] + target_at
        step, target_step = sources[source].width, targets[target].width
        if last is not None and last[2:6] == (length, rows, step, target_step):
            if count == 1:
                last = last._replace(source_skip=begin - last.source, target_skip=end - last.target)
                next_source, next_target = begin, end
            if begin == next_source and end == next_target:
                count += 1
                next_source, next_target = begin + last.source_skip, end + last.target_skip
                continue
        if last is not None:
            moves.append(last._replace(matrices=count))
        last, count = Move(begin, end, length, rows, step, target_step, 1, 0, 0), 1
    if last is not None:
        moves.append(last._replace(matrices=count))
    return moves
