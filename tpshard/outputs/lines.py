"""The levels of a verification as lines for a terminal: every error beside its gate."""

from __future__ import annotations

from collections.abc import Iterator

from ..report import size
from ..verdicts import LevelVerdict, worst
from .blocks import blocks_of, failing_first, number, percent

_MOST_ROWS = 12


def lines(verdict: LevelVerdict) -> Iterator[str]:
    """One level: its verdict, then what was measured."""
    mode = f", ranks run {'zero-padded' if verdict.mode == 'zero-pad' else 'in local shapes'}" if verdict.mode else ""
    where = f" on {verdict.ran_on}" if verdict.ran_on else ""
    yield f"  {verdict.level:<10}{verdict.verdict.replace('_', ' ')}{where} ({verdict.seconds:.2f} s{mode})"
    if verdict.measures:
        top = worst(verdict.measures)
        assert top is not None
        rank = "" if top.rank is None else f" on rank {top.rank}"
        blocks = blocks_of(verdict)
        free = max((block.free for block in blocks if block.free is not None), default=None)
        told = f", {number(free)} free running" if free is not None else ""
        yield (
            f"    {len(verdict.measures)} points in {len(blocks)} blocks: worst error {number(top.error)} at "
            f"{top.point}{rank}, gate {number(top.gate)}{told}"
        )
        bad = [block for block in failing_first(blocks) if block.bad]
        for block in bad[:_MOST_ROWS]:
            found = block.worst
            rank = "" if found.rank is None else f" on rank {found.rank}"
            yield f"    {block.status} {found.point}{rank}: {number(found.error)}, gate {number(found.gate)}"
        if len(bad) > _MOST_ROWS:
            yield f"    and {len(bad) - _MOST_ROWS} more blocks"
    if verdict.coverage is not None:
        yield f"    {percent(verdict.coverage)} of the parameters that the model uses exercised" + (
            f"; compared by bytes only: {', '.join(verdict.unreached[:3])}"
            + (f" and {len(verdict.unreached) - 3} more" if len(verdict.unreached) > 3 else "")
            if verdict.unreached
            else ""
        )
    if verdict.logits:
        yield "    logits: " + ", ".join(f"{name} {value:.4g}" for name, value in verdict.logits.items())
    if verdict.collectives:
        counted = ", ".join(f"{count} {kind}" for kind, count in verdict.collectives.items())
        each = verdict.collective_bytes_per_token
        in_dtype = f" in {verdict.collective_dtype}" if verdict.collective_dtype else ""
        told = "by theory " if verdict.level == "plan" else ""
        yield f"    {told}{counted} a pass" + ("" if each is None else f", {size(each)} a token forward{in_dtype}")
    for note in verdict.notes:
        yield f"    {note}"
