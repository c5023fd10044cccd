"""What a comparison found: stored tensors that aren't what they should be."""

from __future__ import annotations

import threading
from typing import NamedTuple

from .routing import Task


class Difference(NamedTuple):
    """One stored tensor that isn't what it should be."""

    tensor: str  # its name in the file
    kind: str  # "content", "replica", "padding" or "digest"
    where: str  # the file that holds it
    other: str  # the file it was compared with, or the digest that was promised
    offset: int  # of the first byte that differs, from the start of the stored tensor


class Findings:
    """The differences of a run: the first byte of each kind for each stored tensor. Shared by threads."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], Difference] = {}
        self._lock = threading.Lock()

    def add(self, extent: int, difference: Difference) -> None:
        """Keep ``difference`` unless one at a lower offset is known for the extent."""
        with self._lock:
            key = (difference.kind, extent)
            known = self._first.get(key)
            if known is None or (difference.offset, difference.other) < (known.offset, known.other):
                self._first[key] = difference

    def by_write(self) -> dict[int, Difference]:
        """Return the content differences by the index of their write extent."""
        return {extent: found for (kind, extent), found in self._first.items() if kind == "content"}

    def name_origin(self, write: int, name: str) -> None:
        """Say from which file the differing byte of a write extent comes."""
        key = ("content", write)
        self._first[key] = self._first[key]._replace(other=name)

    def sorted(self) -> list[Difference]:
        """Return them by file, tensor and kind, the same for every thread count and tile size."""
        return sorted(self._first.values(), key=lambda d: (d.where, d.tensor, d.kind, d.offset))


def origin(task: Task, write: int, offset: int) -> int | None:
    """Return the read extent that byte ``offset`` of write extent ``write`` comes from; None for padding."""
    for strip in task.strips:
        for target, span in enumerate(strip.targets):
            if task.writes[span.extent] != write or not span.at <= offset < span.at + strip.rows * span.width:
                continue
            column = (offset - span.at) % span.width
            for copy in strip.route.copies:
                if copy.target == target and copy.target_at <= column < copy.target_at + copy.length:
                    return task.reads[strip.sources[copy.source].extent]
    return None
