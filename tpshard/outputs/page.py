"""One HTML page of a verification: self-contained, without a script, readable offline and in the dark.

Everything that comes from a file or the command line is escaped, and the page's own content policy
forbids it to load anything at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..report import size
from ..reports import Verification
from ..verdicts import LevelVerdict, worst
from .blocks import Block, blocks_of, failing_first, number, percent
from .chart import errors_chart, ranks_chart, text
from .headline import counts_of, headline
from .style import CSS

_MOST_FINDINGS, _MOST_ROWS, _MOST_NAMES = 200, 400, 400
_WORDS = {
    "passed": "passed", "failed": "failed", "unsupported": "unsupported", "source_nan": "source holds NaN",
    "not_run": "not run", "pass": "passed", "fail": "over its gate", "drift": "drifted", "skip": "skipped",
}  # fmt: skip


def page(report: Verification) -> str:
    """The report as one HTML document."""
    state, levels = headline(report)
    word = _WORDS[state][0].upper() + _WORDS[state][1:]
    title = f"{word}: {report.shards}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{text(title)}</title><style>{CSS}</style></head><body>",
        f'<header class="{state}"><div class="wrap"><p class="kicker">tpshard verify</p>',
        f"<h1>{_icon(state)} {text(word)}</h1>",
        f'<p class="kicker">{text(", ".join(levels))}</p>' if levels else "",
        f'<p class="what">{text(report.shards)}</p><dl class="facts">{_facts(report)}</dl></div></header>',
        '<main class="wrap">',
    ]
    if report.findings:
        parts.append(_findings(report))
    parts.append(_levels(report))
    for verdict in report.verdicts:
        if verdict.measures or verdict.coverage is not None or verdict.logits:
            parts.append(_level(verdict))
    if report.rank_bytes:
        parts.append(_ranks(report.rank_bytes))
    parts.append(_collectives(report.verdicts))
    parts.append(_circumstances(report))
    parts.append("</main></body></html>\n")
    return "\n".join(part for part in parts if part)


def _facts(report: Verification) -> str:
    facts = [("ranks", str(report.tp_size))]
    if report.against:
        facts.append(("against", report.against))
    facts.append(("checked", ", ".join(counts_of(report)).removesuffix(" checked")))
    if report.gates.get("compute") and any(verdict.measures for verdict in report.verdicts):
        facts.append(("compute", str(report.gates["compute"])))
    facts.append(("time", f"{sum(verdict.seconds for verdict in report.verdicts):.2f} s"))
    return _pairs(facts)


def _pairs(values: Iterable[tuple[str, str]]) -> str:
    """Terms and what they are, for a ``dl``."""
    return "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in values)


def _path(name: str) -> str:
    """A module's or tensor's name, which may break after its dots and nowhere else."""
    return f"<code>{text(name).replace('.', '.<wbr>')}</code>"


def _icon(state: str) -> str:
    mark = {"passed": "✓", "failed": "✕", "pass": "✓", "fail": "✕", "drift": "▲"}.get(state, "•")
    return f'<span class="icon" aria-hidden="true">{mark}</span>'


def _badge(state: str) -> str:
    return f'<span class="badge {text(state)}">{_icon(state)}{text(_WORDS.get(state, state))}</span>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Cells of ``rows`` are HTML; the head and caption are text. A head that ends in ``>`` is of numbers.

    A row of one cell goes across the whole table, and belongs to the row above it.
    """
    columns = [(name.rstrip(">"), ' class="n"' if name.endswith(">") else "") for name in head]
    out = [f'<div class="scroll"><table><caption>{text(caption)}</caption><thead><tr>']
    out += [f'<th scope="col"{kind}>{text(name)}</th>' for name, kind in columns]
    out.append("</tr></thead><tbody>")
    for row in rows:
        if len(row) == 1:
            out.append(f'<tr class="notes"><td colspan="{len(columns)}">{row[0]}</td></tr>')
            continue
        cells = [f"<td{kind}>{cell}</td>" for cell, (_, kind) in zip(row, columns, strict=True)]
        out.append(f"<tr>{''.join(cells)}</tr>")
    return "".join([*out, "</tbody></table></div>"])


def _findings(report: Verification) -> str:
    shown = report.findings[:_MOST_FINDINGS]
    items = [f'<li><span class="tag">{text(f.level)}</span> {text(f.message)}</li>' for f in shown]
    if len(report.findings) > len(shown):
        items.append(f"<li>and {len(report.findings) - len(shown)} more; the JSON report lists all</li>")
    title = f"{len(report.findings)} finding{'s' if len(report.findings) > 1 else ''}"
    return f'<section class="findings"><h2>{title}</h2><ol>{"".join(items)}</ol></section>'


def _levels(report: Verification) -> str:
    if not report.verdicts:
        return '<section class="findings"><h2>Nothing was checked</h2><p>No level was run.</p></section>'
    rows: list[tuple[str, ...]] = []
    for verdict in report.verdicts:
        top = worst(verdict.measures)
        notes = "".join(f'<div class="note">{text(note)}</div>' for note in verdict.notes[:6])
        rows.append(
            (
                f"<b>{text(verdict.level)}</b>",
                _badge(verdict.verdict),
                text(verdict.mode),
                str(len(verdict.measures) or ""),
                number(top.error) if top else "",
                number(top.gate) if top else "",
                percent(verdict.coverage) if verdict.coverage is not None else "",
                f"{verdict.seconds:.2f}",
                size(verdict.peak_memory) if verdict.peak_memory else "",
            )
        )
        if notes:
            rows.append((notes,))
    head = ("level", "verdict", "run as", "points>", "worst error>", "its gate>", "coverage>", "seconds>", "memory>")
    made = _table(head, rows, "Every level that was asked for, and its verdict")
    return f"<section><h2>Levels of proof</h2>{made}</section>"


def _level(verdict: LevelVerdict) -> str:
    blocks = blocks_of(verdict)
    parts = [f"<section><h2>{text(verdict.level.capitalize())}, block by block</h2>"]
    if blocks:
        title = f"Relative error of {len(blocks)} blocks at level {verdict.level}, logarithmic, each under its gate"
        parts.append(
            '<p class="legend"><span class="key forced"></span>teacher forced: every rank ran on the original’s input '
            + ('<span class="key free"></span>free running ' if any(b.free is not None for b in blocks) else "")
            + '<span class="key gate"></span>gate <span class="key cross">✕</span>over its gate</p>'
        )
        parts.append(f'<div class="scroll" tabindex="0">{errors_chart(blocks, title)}</div>')
        bad = [block for block in failing_first(blocks) if block.bad]
        if bad:
            parts.append(_blocks(bad, "Blocks over their gate, or drifted, worst first"))
        every = _blocks(blocks, "All blocks")
        parts.append(f"<details><summary>All {len(blocks)} blocks, in order</summary>{every}</details>")
    if verdict.coverage is not None:
        parts.append(_coverage(verdict))
    if verdict.logits:
        figures = _pairs((name.replace("_", " "), f"{value:.6g}") for name, value in verdict.logits.items())
        parts.append(f'<h3>Logits, the ranks’ against the original’s</h3><dl class="facts">{figures}</dl>')
    return "".join([*parts, "</section>"])


def _blocks(blocks: Sequence[Block], caption: str) -> str:
    rows: list[tuple[str, ...]] = []
    for block in blocks[:_MOST_ROWS]:
        top = block.worst
        rows.append(
            (
                _path(block.name),
                _path(top.point),
                "all" if top.rank is None else str(top.rank),
                number(top.error),
                number(block.free),
                number(top.max_abs),
                number(top.gate),
                _badge(block.status),
            )
        )
        if top.note:
            rows.append((f'<div class="note">{text(top.note)}</div>',))
    if len(blocks) > _MOST_ROWS:
        caption += f" (the first {_MOST_ROWS} of {len(blocks)})"
    head = ("block", "worst point", "rank>", "teacher forced>", "free running>", "max abs>", "gate>", "")
    return _table(head, rows, caption)


def _coverage(verdict: LevelVerdict) -> str:
    part = min(max(verdict.coverage or 0.0, 0.0), 1.0)
    out = [f"<h3>Coverage {percent(verdict.coverage)} of the parameters that the model uses</h3>"]
    out.append(f'<div class="meter" aria-hidden="true"><div style="width:{100 * part:.4f}%"></div></div>')
    if verdict.unreached:
        names = "".join(f"<li>{_path(name)}</li>" for name in verdict.unreached[:_MOST_NAMES])
        more = len(verdict.unreached) - _MOST_NAMES
        names += f"<li>and {more} more</li>" if more > 0 else ""
        told = f"Compared by bytes only: {len(verdict.unreached)}"
        out.append(f"<details><summary>{told}</summary><ul>{names}</ul></details>")
    else:
        out.append('<p class="note">Every parameter had a part in what was compared.</p>')
    return "".join(out)


def _ranks(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    told = f"{size(low)} on every rank"
    if low != high:
        told = f"{size(low)} to {size(high)}, {100 * (high - low) / high:.2f}% apart"
    title = f"Bytes of tensors on each of {len(sizes)} ranks: {told}"
    return (
        f'<section><h2>Bytes by rank</h2><p class="note">{text(told)}</p>'
        f'<div class="scroll" tabindex="0">{ranks_chart(sizes, title)}</div></section>'
    )


def _collectives(verdicts: Iterable[LevelVerdict]) -> str:
    rows = []
    for verdict in verdicts:
        for kind, count in verdict.collectives.items():
            payload = verdict.collective_bytes_per_token
            told = "by theory" if verdict.level == "plan" else "counted"
            each = "" if payload is None else f"{payload:,.0f}"
            rows.append((text(verdict.level), told, text(kind), str(count), each))
    if not rows:
        return ""
    head = ("level", "", "collective", "count>", "bytes a token, all kinds>")
    made = _table(head, rows, "How often the ranks must wait for each other")
    return f"<section><h2>Collectives of one pass</h2>{made}</section>"


def _circumstances(report: Verification) -> str:
    parts = ["<section><h2>Circumstances</h2>"]
    if report.command:
        parts.append(f'<pre tabindex="0"><code>{text(" ".join(report.command))}</code></pre>')
    groups: list[tuple[str, Mapping[str, object]]] = [
        ("Versions", report.versions),
        ("Hardware", report.hardware),
        ("Gates", {key: value for key, value in report.gates.items() if not isinstance(value, dict)}),
        ("Gates of blocks", _overrides(report)),
        ("Baseline", {key: value for key, value in report.baseline.items() if not isinstance(value, dict)}),
    ]
    cells = []
    for name, values in groups:
        if values:
            items = _pairs((str(key).replace("_", " "), _plain(value)) for key, value in values.items())
            cells.append(f"<div><h3>{name}</h3><dl>{items}</dl></div>")
    parts.append(f'<div class="columns">{"".join(cells)}</div>')
    parts += [f'<p class="note">{text(warning)}</p>' for warning in report.warnings]
    return "".join([*parts, "</section>"])


def _overrides(report: Verification) -> Mapping[str, object]:
    found = report.gates.get("blocks")
    return found if isinstance(found, dict) else {}


def _plain(value: object) -> str:
    if value is None:
        return "calibrated on the original"
    return f"{value:g}" if isinstance(value, float) else str(value)
