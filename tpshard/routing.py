"""How the bytes of one logical tensor travel from its source holders to its target holders.

A *strip* is a set of byte matrices of equal height: every end of it, source or target, is
``rows`` rows of some ``width`` bytes that lie contiguously in a file. A :class:`Route` says which
columns (bytes within a row) go where; it does not know names, files or offsets, so every tensor of
one geometry shares one route. All positions and lengths are bytes; ranges are half-open.
"""

from __future__ import annotations

from typing import NamedTuple


class Copy(NamedTuple):
    """Columns ``[source_at, source_at + length)`` of one source become columns of one target."""

    source: int  # index into the strip's sources
    source_at: int
    target: int  # index into the strip's targets
    target_at: int
    length: int


class Fill(NamedTuple):
    """Columns of a target that no source holds: padding, written as zero bytes."""

    target: int
    target_at: int
    length: int


class Same(NamedTuple):
    """Columns that a second source also holds and that must equal the ones that are copied."""

    source: int
    source_at: int
    other: int
    other_at: int
    length: int


class Zero(NamedTuple):
    """Columns of a source that are padding: they must be zero, and they are copied nowhere."""

    source: int
    source_at: int
    length: int


class Route(NamedTuple):
    """The column map of a strip; shared by all tensors of one geometry."""

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...] = ()
    same: tuple[Same, ...] = ()
    zeros: tuple[Zero, ...] = ()


class Span(NamedTuple):
    """One end of a strip: ``rows`` rows of ``width`` bytes, contiguous, inside a stored tensor.

    It names its extent by the place in the task's list, so that tensors of one geometry share their strips.
    """

    extent: int  # index into the task's reads (a source) or writes (a target)
    at: int  # byte offset of row 0 from the start of the extent
    width: int  # bytes a row


class Strip(NamedTuple):
    """Byte matrices of equal height and the columns that pass between them."""

    rows: int
    sources: tuple[Span, ...]
    targets: tuple[Span, ...]
    route: Route


class Extent(NamedTuple):
    """A stored tensor as a contiguous byte range of a file."""

    tensor: str  # its name in that file
    file: int  # index into the plan's source or target files
    offset: int  # absolute, in bytes
    nbytes: int


class Task(NamedTuple):
    """Strips that must be executed together and in order; no other task touches their extents."""

    tensor: str  # the logical tensor, for messages
    strips: tuple[Strip, ...]
    reads: tuple[int, ...]  # extents read, indices into the plan's reads
    writes: tuple[int, ...]  # extents written, indices into the plan's writes
