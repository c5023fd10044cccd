"""What becomes of the bytes of a strip's sources, stretch by stretch, and the order in which to take them."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from .routing import Route


class Segment(NamedTuple):
    """A stretch of a source's columns with one fate; ``source`` -1 is a fill."""

    source: int
    at: int
    length: int
    targets: tuple[tuple[int, int], ...]  # (target, column)
    others: tuple[tuple[int, int], ...]  # (source, column) of the replicas to compare
    blank: bool


def segments_of(route: Route) -> list[Segment]:
    """Cut the columns of each source where a copy, a comparison or padding begins or ends.

    Every segment's bytes then have one fate, so that each is read once whatever is done with it.
    """
    pieces: dict[int, list[tuple[int, int, str, int, int]]] = {}  # source -> (start, end, kind, index, column)
    for source, source_at, target, target_at, length in route.copies:
        pieces.setdefault(source, []).append((source_at, source_at + length, "copy", target, target_at))
    for source, source_at, other, other_at, length in route.same:
        pieces.setdefault(source, []).append((source_at, source_at + length, "same", other, other_at))
    for source, source_at, length in route.zeros:
        pieces.setdefault(source, []).append((source_at, source_at + length, "zero", 0, 0))
    segments = []
    for source, found in pieces.items():
        found = sorted(piece for piece in found if piece[1] > piece[0])
        cuts = sorted({cut for piece in found for cut in piece[:2]})
        begun = 0
        active: list[tuple[int, int, str, int, int]] = []
        for start, end in pairwise(cuts):
            active = [piece for piece in active if piece[1] > start]
            while begun < len(found) and found[begun][0] == start:
                active.append(found[begun])
                begun += 1
            if active:
                targets = tuple((p[3], p[4] + start - p[0]) for p in active if p[2] == "copy")
                others = tuple((p[3], p[4] + start - p[0]) for p in active if p[2] == "same")
                segments.append(
                    Segment(source, start, end - start, targets, others, any(p[2] == "zero" for p in active))
                )
    for target, target_at, length in route.fills:
        if length:
            segments.append(Segment(-1, 0, length, ((target, target_at),), (), False))
    return segments


def in_stream_order(segments: list[Segment]) -> tuple[Segment, ...]:
    """Order segments so that each source is read and each target written in ascending order, if that can be.

    Digests are then taken as the bytes pass. Where the column map turns an order round (a rotary
    permutation), sources ascend and targets don't.
    """
    chains: dict[tuple[bool, int], list[tuple[int, int]]] = {}
    for index, segment in enumerate(segments):
        if segment.source >= 0:
            chains.setdefault((True, segment.source), []).append((segment.at, index))
        for other, at in segment.others:
            chains.setdefault((True, other), []).append((at, index))
        for target, at in segment.targets:
            chains.setdefault((False, target), []).append((at, index))
    after: list[list[int]] = [[] for _ in segments]
    waits = [0] * len(segments)
    for chain in chains.values():
        chain.sort()
        for (_, before), (_, behind) in pairwise(chain):
            after[before].append(behind)
            waits[behind] += 1
    ready = [(segments[index][:2], index) for index, count in enumerate(waits) if not count]
    heapify(ready)
    ordered = []
    while ready:
        _, index = heappop(ready)
        ordered.append(segments[index])
        for behind in after[index]:
            waits[behind] -= 1
            if not waits[behind]:
                heappush(ready, (segments[behind][:2], behind))
    if len(ordered) < len(segments):
        ordered = sorted(segments)
    return tuple(ordered)
