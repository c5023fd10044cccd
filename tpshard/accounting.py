"""What a layout weighs and what is to be known of it: bytes a rank, inequality, padding, sums over ranks."""

from __future__ import annotations

from collections.abc import Mapping

from .axes import Dim
from .degrees import axes_of, describe_held_whole, describe_padding, describe_uneven, held_whole, paddings, uneven
from .layout import Layout
from .manifest import Note
from .planning import Placed, stored_bytes
from .reports import Conversion, sharded_fraction
from .table import ADDED_ONCE, NEEDS_SUM, template_of


def conversion_report(
    verb: str,
    source: str,
    output: str,
    *,
    family: str,
    from_tp_size: int,
    target: Placed,
    dims: Mapping[str, tuple[Dim, ...]],
    notes: Mapping[str, Note],
    dry_run: bool,
) -> Conversion:
    """The report of a conversion as far as it is known before anything has moved."""
    layout = target.layout
    axes = list(axes_of(dims))
    rank_bytes = bytes_by_rank(target)
    report = Conversion(
        verb,
        source=source,
        output=output,
        family=family,
        from_tp_size=from_tp_size,
        to_tp_size=layout.size,
        tensors=len(layout.tensors),
        dry_run=dry_run,
        rank_bytes=rank_bytes,
        sharded_fraction=sharded_fraction(rank_bytes, logical_bytes(layout)),
        files=[file.name for file in target.files],
        layout=layout.digest,
    )
    report.held_whole = [describe_held_whole(axis, layout.size) for axis in held_whole(axes, layout.size)]
    if layout.size > 1:
        report.uneven = [describe_uneven(found) for found in uneven(axes, layout.size)]
        report.padding = [describe_padding(found) for found in paddings(axes, layout.size)]
    report.needs_sum = patterns(notes, NEEDS_SUM)
    report.added_once = patterns(notes, ADDED_ONCE)
    return report


def patterns(notes: Mapping[str, Note], text: str) -> list[str]:
    """The name patterns of the tensors whose note is ``text``, each once."""
    return list(dict.fromkeys(template_of(name)[0] for name, note in notes.items() if note.text == text))


def bytes_by_rank(placed: Placed) -> list[int]:
    """Bytes of tensors that every rank stores."""
    held = [0] * placed.layout.size
    for row in placed.extents:
        for rank, extent in enumerate(row):
            held[rank] += extent.nbytes if extent else 0
    return held


def logical_bytes(layout: Layout) -> int:
    """Bytes of all logical tensors, each once and without padding."""
    return sum(stored_bytes(tensor.shape, tensor.dtype) for tensor in layout.tensors.values())
