"""Dimensions, axes and runs as the short texts that stand in ``tpshard.json``.

A segment is ``AXIS.VIEW[START:STOP]*SIZE`` (``SIZE`` stored indices for each of the axis' units from
START to STOP; with ``/PER`` behind it, for every PER of them) or ``whole*SIZE``; the runs of a rank are
``START:STOP`` and ``pad:LENGTH`` in stored order, separated by blanks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .axes import Axis, Dim, Heads, Padded, Segment, Units
from .errors import LayoutError
from .fields import shown_value
from .intervals import PAD, Runs

_SEGMENT = re.compile(
    r"(?:whole|(?P<axis>[^\[\]*]+)\.(?P<view>\w+)\[(?P<start>[0-9]{1,18}):(?P<stop>[0-9]{1,18})\])\*(?P<size>[0-9]{1,18})"
    r"(?:/(?P<per>[0-9]{1,18}))?"
)
_AXES: dict[str, type[Units] | type[Heads] | type[Padded]] = {"units": Units, "heads": Heads, "padded": Padded}


def segment_text(segment: Segment) -> str:
    """``heads.query[0:9]*64`` or ``whole*128``."""
    if segment.axis is None:
        return f"whole*{segment.size}"
    per = f"/{segment.per}" if segment.per != 1 else ""
    return f"{segment.axis.name}.{segment.view}[{segment.start}:{segment.stop}]*{segment.size}{per}"


def dim_texts(dim: Dim) -> list[str]:
    """The segments of a dimension as texts."""
    return [segment_text(segment) for segment in dim.segments]


def parse_dim(texts: list[str], axes: Mapping[str, Axis]) -> Dim:
    """The dimension that the texts describe.

    Raises:
        LayoutError: a text is malformed, or names an axis, view or units that do not exist.
    """
    segments = []
    for text in texts:
        found = _SEGMENT.fullmatch(text)
        if found is None:
            raise LayoutError(f"{text[:80]!r} is not a segment")
        size, per = int(found["size"]), int(found["per"] or 1)
        if found["axis"] is None:
            segments.append(Segment(None, "", 0, 1, size))
            continue
        axis, view = axes.get(found["axis"]), found["view"]
        start, stop = int(found["start"]), int(found["stop"])
        if axis is None or view not in axis.views() or not 0 <= start <= stop <= axis.views()[view]:
            raise LayoutError(f"{text[:80]!r} refers to units that no axis has")
        if per < 1:
            raise LayoutError(f"{text[:80]!r} is not a segment")
        segments.append(Segment(axis, view, start, stop, size, per))
    return Dim(tuple(segments))


def axis_fields(axis: Axis) -> dict[str, object]:
    """The numbers of an axis as JSON: its kind and every field but the name; what is false is left out."""
    values = {key: value for key, value in vars(axis).items() if key != "name" and value is not False}
    return {"kind": axis.kind, **values}


def parse_axis(name: str, fields: Mapping[str, object]) -> Axis:
    """The axis with these fields.

    Raises:
        LayoutError: the kind is unknown or a number is out of range.
        UnsupportedError: the counts contradict each other.
    """
    given = fields.get("kind")
    kind = _AXES.get(given) if isinstance(given, str) else None
    if kind is None:
        raise LayoutError(f"axis {name!r:.80} is of the unknown kind {shown_value(given)}")
    values: dict[str, object] = {}
    for key, kind_of in kind.__annotations__.items():
        value = fields.get(key, False if kind_of == "bool" else None)
        if kind_of == "bool" and not isinstance(value, bool):
            raise LayoutError(f"axis {name!r:.80}: {key} is {shown_value(value)}, not true or false")
        if kind_of == "int" and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 48):
            raise LayoutError(f"axis {name!r:.80}: {key} is {shown_value(value)}, not a positive whole number")
        if kind_of == "str" and not isinstance(value, str):
            raise LayoutError(f"axis {name!r:.80}: {key} is {shown_value(value)}, not text")
        values[key] = value
    return kind(name, **values)  # type: ignore[arg-type]


def runs_text(runs: Runs) -> str:
    """``0:16 32:48 pad:3``."""
    return " ".join(
        f"pad:{run.length}" if run.start == PAD else f"{run.start}:{run.start + run.length}" for run in runs
    )
