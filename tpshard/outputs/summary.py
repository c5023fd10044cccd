"""A Markdown summary for ``$GITHUB_STEP_SUMMARY``: the verdict, then what failed, then the levels.

GitHub shows at most 1 MiB of a step's summary, so lists are cut and say so.
"""

from __future__ import annotations

import re
from html import escape

from ..report import size
from ..reports import Verification
from ..verdicts import worst
from .blocks import Block, blocks_of, failing_first, number, percent
from .files import legal
from .headline import headline, verdict_of

_MOST_ROWS = 30
_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~!$])")
_MARKS = {"passed": "✅", "failed": "❌", "unsupported": "⚠️", "source_nan": "⚠️", "not_run": "⏭️"}


def summary(report: Verification) -> str:
    """The report as GitHub Markdown."""
    lines = [f"## {_MARKS[headline(report)[0]]} tpshard verify: {_text(verdict_of(report))}", ""]
    against = f" against {_text(report.against)}" if report.against else ""
    lines += [f"{_text(report.shards)} ({report.tp_size} ranks){against}", ""]
    if not report.verdicts:
        lines += ["**Nothing was checked: no level was run.**", ""]
    blocks = [block for verdict in report.verdicts for block in blocks_of(verdict)]
    failing = [block for block in failing_first(blocks) if block.bad]
    if failing:
        lines += _rows("Blocks over their gate", failing)
    if report.findings:
        lines += ["### Findings", ""]
        lines += [f"- **{_text(f.level)}**: {_text(f.message)}" for f in report.findings[:_MOST_ROWS]]
        if len(report.findings) > _MOST_ROWS:
            lines.append(f"- and {len(report.findings) - _MOST_ROWS} more")
        lines.append("")
    if report.verdicts:
        lines += _levels(report)
    rest = [block for block in failing_first(blocks) if not block.bad]
    if rest:
        title = "<details><summary>Blocks nearest to their gate</summary>"
        lines += [title, "", *_rows("", rest[:10]), "</details>", ""]
    lines += [f"> {_text(text)}" for text in report.warnings]
    told = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines += ["", f"<sub>{_text(told)}</sub>" if told else ""]
    return "\n".join(lines).rstrip() + "\n"


def _levels(report: Verification) -> list[str]:
    lines = ["| level | verdict | measured | worst error | its gate | coverage | seconds |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|")
    for verdict in report.verdicts:
        top = worst(verdict.measures)
        mode = f" ({verdict.mode})" if verdict.mode else ""
        cells = (
            f"{verdict.level}{mode}",
            f"{_MARKS.get(verdict.verdict, '')} {verdict.verdict.replace('_', ' ')}",
            str(len(verdict.measures)) if verdict.measures else "",
            number(top.error) if top else "",
            number(top.gate) if top else "",
            percent(verdict.coverage) if verdict.coverage is not None else "",
            f"{verdict.seconds:.2f}",
        )
        lines.append("| " + " | ".join(_text(cell) for cell in cells) + " |")
    lines.append("")
    if report.rank_bytes:
        low, high = min(report.rank_bytes), max(report.rank_bytes)
        lines += [f"{size(low)} a rank" if low == high else f"{size(low)} to {size(high)} a rank", ""]
    return lines


def _rows(title: str, blocks: list[Block]) -> list[str]:
    lines = [f"### {title}", ""] if title else []
    lines += ["| block | point | rank | teacher forced | free running | gate | |", "|---|---|--:|--:|--:|--:|---|"]
    for block in blocks[:_MOST_ROWS]:
        measure = block.worst
        rank = "" if measure.rank is None else str(measure.rank)
        errors = number(measure.error), number(block.free), number(measure.gate)
        cells = (block.name, measure.point, rank, *errors, block.status)
        lines.append("| " + " | ".join(_text(cell) for cell in cells) + " |")
    if len(blocks) > _MOST_ROWS:
        lines.append(f"| and {len(blocks) - _MOST_ROWS} more | | | | | | |")
    return [*lines, ""]


def _text(text: str) -> str:
    """Any text as one line of Markdown that shows it as it is."""
    shown = _SPECIAL.sub(r"\\\1", legal(text).replace("\n", " ").replace("\r", " "))
    return escape(shown, quote=False)
