"""Measures gathered by block, the way reports show them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..verdicts import LevelVerdict, Measure, excess, worst


@dataclass
class Block:
    """One block of one level: its measures, and the one that is worst against its gate."""

    level: str
    name: str
    measures: list[Measure] = field(default_factory=list)

    @property
    def worst(self) -> Measure:
        found = worst(self.measures)
        assert found is not None
        return found

    @property
    def bad(self) -> list[Measure]:
        """Measures that failed or drifted, worst first."""
        return sorted((m for m in self.measures if m.status in ("fail", "drift")), key=excess, reverse=True)

    @property
    def status(self) -> str:
        """``fail``, ``drift``, ``pass``, or ``skip`` where every measure was skipped."""
        found = {m.status for m in self.measures}
        return next((status for status in ("fail", "drift", "pass") if status in found), "skip")

    @property
    def free(self) -> float | None:
        """The largest free-running error; NaN counts as largest."""
        values = [m.free for m in self.measures if m.free is not None]
        return max(values, key=lambda value: math.inf if math.isnan(value) else value, default=None)


def blocks_of(verdict: LevelVerdict) -> list[Block]:
    """The blocks of a level in the order in which they were measured."""
    found: dict[str, Block] = {}
    for measure in verdict.measures:
        name = measure.block or measure.point
        found.setdefault(name, Block(verdict.level, name)).measures.append(measure)
    return list(found.values())


def failing_first(blocks: Iterable[Block]) -> list[Block]:
    """Failed blocks, then drifted ones, then the rest; each by how near they are to their gate."""
    order = {"fail": 0, "drift": 1, "pass": 2, "skip": 3}
    return sorted(blocks, key=lambda block: (order[block.status], -min(excess(block.worst), 1e300)))


def number(value: float | None) -> str:
    """An error for people: ``2.7e-15``; 0 for none at all."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    return f"{value:.1e}"


def percent(part: float | None) -> str:
    """A part in percent that only reads 100% where it is all of it."""
    if part is None:
        return "not measured"
    text = f"{100 * part:.4f}".rstrip("0").rstrip(".")
    return ("99.9999" if text == "100" and part < 1 else text) + "%"
