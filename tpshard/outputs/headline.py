"""The verdict of a whole run in a word, with the levels that it comes from."""

from __future__ import annotations

from ..reports import Verification
from ..verdicts import FAILED, NOT_RUN, PASSED, SOURCE_NAN, UNSUPPORTED

WORDS = {
    PASSED: "passed", FAILED: "FAILED", SOURCE_NAN: "SOURCE HOLDS NaN", UNSUPPORTED: "UNSUPPORTED", NOT_RUN: "NOT RUN",
}  # fmt: skip


def headline(report: Verification) -> tuple[str, list[str]]:
    """``(verdict, levels)``: one of :data:`tpshard.verdicts.VERDICTS`, and the levels that gave it, each once.

    A run that did not pass is named by the worst that was found, in the order in which the exit status is
    chosen: a failure, NaN in the source, a level that cannot run, a level that was not run.
    """
    if report.passed:
        return PASSED, list(report.levels)
    failed = [verdict.level for verdict in report.verdicts if verdict.verdict == FAILED]
    failed += [finding.level for finding in report.findings]
    if failed:
        return FAILED, list(dict.fromkeys(failed))
    for kind in (SOURCE_NAN, UNSUPPORTED):
        levels = [verdict.level for verdict in report.verdicts if verdict.verdict == kind]
        if levels:
            return kind, levels
    return NOT_RUN, [verdict.level for verdict in report.verdicts if verdict.verdict == NOT_RUN]


def verdict_of(report: Verification) -> str:
    """The headline as text: ``FAILED (digest, forward)``."""
    verdict, levels = headline(report)
    return WORDS[verdict] + (f" ({', '.join(levels)})" if levels else "")


def counts_of(report: Verification) -> list[str]:
    """How many files were looked at, and where a level compared tensors by bytes, how many of those."""
    from ..counting import counted
    from ..report import size

    out = [counted(report.files_checked, "file")]
    if report.tensors_checked:
        out += [counted(report.tensors_checked, "tensor"), f"{size(report.bytes_checked)} checked"]
    return out
