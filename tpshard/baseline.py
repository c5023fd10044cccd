"""Compares a verification with an earlier one: an error that grew, coverage that shrank, sizes that changed.

A drift is found long before a gate is reached. Errors depend on the processor, the release of torch and
the dtype, so errors are only compared with a run of the same three; of another it is said so. Nothing excuses
another degree, other sizes, or a level that the baseline has and the run lacks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import DamagedError, StorageError, UsageError
from .listing import shown
from .reports import Finding, Verification
from .strictjson import parse_object
from .verdicts import FAILED, NOT_RUN, PASSED, LevelVerdict, Measure

SCHEMA = "tpshard.baseline/1"
GROWTH = 4.0  # an error may grow to four times the stored one ...
NEAR = 100.0  # ... or stay below a hundredth of its gate
_LARGEST = 1 << 28
_AGAIN = "write it again with --write-baseline"


def key_of(report: Verification) -> dict[str, str]:
    """What must be equal for errors to compare: hardware, torch and compute dtype."""
    hardware = " ".join(report.hardware[part] for part in sorted(report.hardware))
    return {
        "hardware": hardware,
        "torch": report.versions.get("torch", "none"),
        "compute": str(report.gates.get("compute", "")),
    }


def written(report: Verification) -> dict[str, Any]:
    """The baseline that this run makes, as JSON values."""
    return {
        "schema": SCHEMA,
        "key": key_of(report),
        "tp_size": report.tp_size,
        "rank_bytes": list(report.rank_bytes),
        "levels": {
            verdict.level: {
                "mode": verdict.mode,
                "coverage": verdict.coverage,
                "errors": {_name(m): m.error for m in verdict.measures if math.isfinite(m.error)},
            }
            for verdict in report.verdicts
            if verdict.verdict == PASSED
        },
    }


def write_baseline(path: str | os.PathLike[str], report: Verification) -> None:
    """Write the baseline of a run that passed.

    Raises:
        UsageError: the run did not pass; a baseline of a fault would hide it.
        StorageError: it cannot be written.
    """
    if not report.passed:
        raise UsageError(f"{shown(path)} is not written: only a verification that passed makes a baseline")
    from .outputs.files import write_text

    write_text(path, json.dumps(written(report), indent=1, sort_keys=True) + "\n")


def read_baseline(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a baseline file.

    Raises:
        UsageError: there is none.
        DamagedError: it is not a baseline.
        StorageError: it cannot be read.
    """
    name = shown(path)
    try:
        if Path(path).stat().st_size > _LARGEST:
            raise DamagedError(f"{name} has more than {_LARGEST} bytes and is no baseline; {_AGAIN}")
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{name} does not exist; make one with --write-baseline {name}") from None
    except OSError as error:
        raise StorageError(f"{name}: reading it failed: {error.strerror or error}") from None
    document = parse_object(raw, name, f"{_AGAIN}.".capitalize())
    if document.get("schema") != SCHEMA:
        raise DamagedError(f"{name} has the schema {document.get('schema')!r:.80}, not {SCHEMA}; {_AGAIN}")
    levels, key, sizes = document.get("levels"), document.get("key"), document.get("rank_bytes")
    sound = isinstance(key, dict) and isinstance(levels, dict) and isinstance(sizes, list)
    of_levels = levels.values() if isinstance(levels, dict) else ()
    if not sound or not all(_is_level(level) for level in of_levels):
        raise DamagedError(f"{name} is not a whole baseline; {_AGAIN}")
    return document


def _is_level(level: object) -> bool:
    errors = level.get("errors") if isinstance(level, dict) else None
    return isinstance(errors, dict) and all(type(error) in (int, float) for error in errors.values())


def compare(report: Verification, path: str | os.PathLike[str], baseline: Mapping[str, Any]) -> None:
    """Hold a run against a baseline: drifts become findings, statuses of measures, and a failed verdict.

    What was compared, and why nothing was, is told in ``report.baseline`` and the warnings.
    """
    name = shown(path)
    mine, theirs = key_of(report), baseline["key"]
    told: dict[str, Any] = {"file": name, "compared": False, "key": mine, "errors": 0, "drifts": 0}
    report.baseline = told
    drifts = list(_lacking(report, baseline, name))
    other = [
        f"{part} is {value!r} here and {theirs.get(part)!r:.120} there"
        for part, value in mine.items()
        if value != theirs.get(part)
    ]
    if baseline.get("tp_size") != report.tp_size:
        other.append(f"there are {report.tp_size} ranks here and {baseline.get('tp_size')!r:.20} there")
    if other:
        told["reason"] = "; ".join(other)
        report.warnings.append(f"errors are not compared with the baseline {name}: {told['reason']}")
    else:
        told["compared"] = True
        drifts += _grown(report, baseline, name)
    told["drifts"] = len(drifts)
    report.findings += drifts
    if drifts:
        report.passed, report.status = False, 1


def _lacking(report: Verification, baseline: Mapping[str, Any], name: str) -> Iterator[Finding]:
    """What no other machine, torch or dtype excuses: another degree, other sizes, a level that was not run."""
    if baseline.get("tp_size") != report.tp_size:
        text = f"there are {report.tp_size} ranks, and {baseline.get('tp_size')!r:.20} in the baseline {name}"
        yield Finding("baseline", name, "", f"{text}; keep a baseline for each degree")
    elif report.rank_bytes != baseline["rank_bytes"]:
        text = f"the ranks' sizes changed from {baseline['rank_bytes']!r:.200} to {report.rank_bytes!r:.200} bytes"
        yield Finding("baseline", name, "", text)
    ran = {verdict.level for verdict in report.verdicts if verdict.verdict != NOT_RUN}
    for level in baseline["levels"]:
        if level not in ran:
            text = f"the baseline {name} holds the level {level!r:.40}, which was not run; ask for it with --level"
            yield Finding("baseline", name, "", text)


def _grown(report: Verification, baseline: Mapping[str, Any], name: str) -> list[Finding]:
    """Drifts of the levels that both ran; each fails its level."""
    drifts: list[Finding] = []
    by_level = {verdict.level: verdict for verdict in report.verdicts}
    for level, stored in baseline["levels"].items():
        verdict = by_level.get(level)
        if verdict is None or verdict.verdict == NOT_RUN:
            continue
        found = list(_drifts(verdict, stored, name))
        report.baseline["errors"] += len(stored["errors"])
        if found:
            verdict.findings += found
            verdict.verdict = FAILED if verdict.verdict == PASSED else verdict.verdict
        drifts += found
    return drifts


def _drifts(verdict: LevelVerdict, stored: Mapping[str, Any], name: str) -> Iterator[Finding]:
    errors: Mapping[str, Any] = stored["errors"]
    seen = set()
    for measure in verdict.measures:
        key = _name(measure)
        seen.add(key)
        old = errors.get(key)
        if not isinstance(old, (int, float)) or measure.status != "pass":
            continue
        if measure.error > GROWTH * old and measure.error > measure.gate / NEAR:
            measure.status = "drift"
            measure.note = f"{old:.2e} in the baseline"
            text = (
                f"{measure.point} drifted: its error is {measure.error:.2e}, {old:.2e} in the baseline, "
                f"and within 1/{NEAR:.0f} of its gate {measure.gate:.0e}"
            )
            yield Finding(verdict.level, name, measure.point, text)
    gone = sorted(set(errors) - seen)
    if gone:
        more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
        text = f"{len(gone)} points of the baseline were not measured: {', '.join(gone[:3])}{more}"
        yield Finding(verdict.level, name, "", text)
    old_coverage = stored.get("coverage")
    if isinstance(old_coverage, (int, float)) and (verdict.coverage is None or verdict.coverage < old_coverage):
        now = "not measured" if verdict.coverage is None else f"{verdict.coverage:.6%}"
        yield Finding(verdict.level, name, "", f"coverage shrank from {old_coverage:.6%} to {now}")


def _name(measure: Measure) -> str:
    rank = "" if measure.rank is None else f" on rank {measure.rank}"
    return f"{measure.kind} {measure.point}{rank}"
