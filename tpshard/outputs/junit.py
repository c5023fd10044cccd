"""JUnit XML: a test suite a level, a test case for the level itself and for every block of it.

Format: the schema that Jenkins, GitLab and GitHub's reporters read (``testsuites/testsuite/testcase`` with
``failure``, ``error`` and ``skipped``).
"""

from __future__ import annotations

from xml.sax.saxutils import quoteattr

from ..reports import Verification
from ..verdicts import FAILED, NOT_RUN, PASSED, LevelVerdict
from .blocks import Block, blocks_of, number
from .files import legal

_SHOWN = 20


def junit(report: Verification) -> str:
    """The report as a JUnit XML document. A report without any level holds one error, so that no reader passes it."""
    suites = [_suite(verdict) for verdict in report.verdicts]
    if not suites:
        suites = [("<testsuite", [_case("verify", "verify", 0.0, "error", "no level was run: nothing was checked")])]
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    every = [case for _, cases in suites for case in cases]
    seconds = sum(verdict.seconds for verdict in report.verdicts)
    name = _quoted(f"tpshard verify {report.shards}")
    lines.append(f'<testsuites name={name} {_counts(every)} time="{seconds:.3f}">')
    for opening, cases in suites:
        lines.append(f" {opening} {_counts(cases)}>")
        lines += [text for _, text in cases]
        lines.append(" </testsuite>")
    return "\n".join([*lines, "</testsuites>", ""])


_Case = tuple[str, str]  # pass, failure, error or skipped; and the element


def _suite(verdict: LevelVerdict) -> tuple[str, list[_Case]]:
    name = f"tpshard.{verdict.level}"
    cases = [_level_case(verdict, name)]
    cases += [_block_case(block, name) for block in blocks_of(verdict)]
    return f'<testsuite name={_quoted(name)} time="{verdict.seconds:.3f}"', cases


def _level_case(verdict: LevelVerdict, suite: str) -> _Case:
    if verdict.verdict == PASSED:
        return _case(suite, "verdict", verdict.seconds)
    shown = [finding.message for finding in verdict.findings[:_SHOWN]]
    if len(verdict.findings) > _SHOWN:
        shown.append(f"and {len(verdict.findings) - _SHOWN} more")
    text = "\n".join([*shown, *verdict.notes]) or verdict.verdict
    kind = {FAILED: "failure", NOT_RUN: "skipped"}.get(verdict.verdict, "error")
    return _case(suite, "verdict", verdict.seconds, kind, text)


def _block_case(block: Block, suite: str) -> _Case:
    bad = block.bad
    if bad:
        lines = [
            f"{m.point}{'' if m.rank is None else f' on rank {m.rank}'}: {m.kind} error {number(m.error)}, "
            f"gate {number(m.gate)}" + (f" ({m.status})" if m.status != "fail" else "")
            for m in bad[:_SHOWN]
        ]
        return _case(suite, block.name, 0.0, "failure", "\n".join(lines))
    if block.status == "skip":
        return _case(suite, block.name, 0.0, "skipped", block.worst.note or "not measured")
    return _case(suite, block.name, 0.0)


def _case(suite: str, name: str, seconds: float, kind: str = "pass", text: str = "") -> _Case:
    head = f'  <testcase classname={_quoted(suite)} name={_quoted(name)} time="{seconds:.3f}"'
    if kind == "pass":
        return kind, head + "/>"
    first = text.split("\n", 1)[0][:300]
    body = legal(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return kind, f"{head}><{kind} message={_quoted(first)}>{body}</{kind}></testcase>"


def _counts(cases: list[_Case]) -> str:
    kinds = [kind for kind, _ in cases]
    return (
        f'tests="{len(kinds)}" failures="{kinds.count("failure")}" errors="{kinds.count("error")}" '
        f'skipped="{kinds.count("skipped")}"'
    )


def _quoted(text: str) -> str:
    return quoteattr(legal(text), {"\n": "&#10;"})
