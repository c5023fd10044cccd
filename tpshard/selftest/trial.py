"""Runs the levels on one planted fault, and says whether they saw it where it is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from tpshard.check import verify
from tpshard.checkpoint import place_source
from tpshard.converters import llama
from tpshard.errors import DamagedError, LayoutError, TpshardError, UnsupportedError
from tpshard.execute import execute
from tpshard.numerics.forward import forward
from tpshard.planning import build_plan
from tpshard.planrules import plan_verdict
from tpshard.reports import Fault
from tpshard.shards import Shards, open_shards
from tpshard.source import Source
from tpshard.verdicts import FAILED, PASSED, LevelVerdict, Measure, excess

from .catalogue import EQUIVALENT, PLAN, UNSEALED, Expected, Mutant
from .drafts import Draft
from .plans import PlanFault
from .scratch import CONFIG, Scratch, layer_of
from .workshop import Workshop

TOKENS = 8
REFUSED = "refused"
FREE_RUNNING = ("logits",)


def run_forward(shards: Shards, source: Source, way: str) -> LevelVerdict:
    """The level *forward* as a user runs it, on few tokens."""
    return forward(shards, source, mode=way, tokens=TOKENS)


def plant(mutant: Mutant, shop: Workshop, family: str, tp_size: int, way: str) -> Fault:
    """Plant a fault in a copy, run the levels, and judge them.

    Raises:
        NotHereError: the fault has no place there.
    """
    good, source = shop.shards(family, tp_size), shop.source(family)
    scratch = Scratch(
        good, source.root,
        shop.shards(family, tp_size, 1) if "another run" in mutant.name else None,
        shop.shards(family, 4 if tp_size == 2 else 2) if "another degree" in mutant.name else None,
    )  # fmt: skip
    expected = mutant.act(scratch)
    directory = shop.fresh()
    began = time.perf_counter()
    try:
        scratch.write(directory, reseal=mutant.kind != UNSEALED)
        fault = Fault(mutant.name, mutant.says, mutant.kind, family, tp_size, way)
        if mutant.kind == UNSEALED:
            _run_bytes(fault, directory, source, expected)
        else:
            _run_ranks(fault, directory, source, expected)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    fault.seconds = time.perf_counter() - began
    return fault


def _run_bytes(fault: Fault, directory: Path, source: Source, expected: Expected) -> None:
    """Damage that the digests tell of: every level that is named must see it by itself."""
    missed = []
    for level in expected.levels:
        try:
            report = verify(directory, against=source.root if level == "bytes" else None, levels=[level])
            seen = [finding for finding in report.findings if finding.level == level]
            note = seen[0].message if seen else ""
        except DamagedError as error:
            seen, note = ([error] if expected.refused else []), str(error)  # type: ignore[list-item]
        if seen:
            fault.levels.append(level)
            fault.note = fault.note or note
        else:
            missed.append(level)
    fault.caught = not missed
    if missed:
        fault.note = f"not seen by {', '.join(missed)}"


def _run_ranks(fault: Fault, directory: Path, source: Source, expected: Expected) -> None:
    """A fault that is sealed: structure and digest see nothing, and the run of the ranks must."""
    if expected.refused:
        try:
            _opened_sealed(directory)
        except DamagedError:
            fault.levels.append(REFUSED)
            fault.caught = True
            return
    shards = _opened_sealed(directory)
    if _differs(shards, source):
        fault.levels.append("bytes")
    _judge(fault, lambda: run_forward(shards, source, fault.way), expected)


def _opened_sealed(directory: Path) -> Shards:
    report = verify(directory, levels=["structure", "digest"])
    if not report.passed:
        raise AssertionError(f"the copy is not sealed: {report.findings[0].message}")
    return open_shards(directory)


def _differs(shards: Shards, source: Source) -> bool:
    """Whether bytes alone tell the shards from the source."""
    try:
        plan = build_plan(place_source(source), shards.placed)
    except LayoutError:
        return True
    paths = [source.root / file.name for file in source.files]
    targets = [(path, path.stat().st_size) for path in shards.paths()]
    outcome = execute(plan.tasks, plan.reads, plan.writes, paths, targets, compare=True, threads=1, algorithm=None)
    return bool(outcome.differences)


def plan_wrongly(wrong: PlanFault, shop: Workshop, family: str, tp_size: int, way: str) -> Fault:
    """Cut by a wrong plan, run the levels, and judge them.

    Raises:
        NotHereError: the plan is the right one there.
    """
    source = shop.source(family)
    # No family's table serves BitNet: Llama's, with the norms between matrices taken for ordinary ones, is the fault.
    draft = Draft(source.root, tp_size, llama.table if family == "bitnet" else None)
    expected = wrong.act(draft)
    directory = shop.fresh()
    began = time.perf_counter()
    try:
        shards = draft.write(directory)
        fault = Fault(wrong.name, wrong.says, PLAN, family, tp_size, way)
        if _differs(shards, source):
            fault.levels.append("bytes")
        verdict = plan_verdict(shards.manifest)
        if verdict.verdict == FAILED:
            fault.levels.append("plan")
            fault.note = verdict.findings[0].message
        if "forward" in expected.levels:
            _judge(fault, lambda: run_forward(shards, source, way), expected)
        missed = [level for level in expected.levels if level not in fault.levels]
        fault.caught = not missed and ("forward" not in expected.levels or fault.caught)
        if missed:
            fault.note = f"not seen by {', '.join(missed)}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    fault.seconds = time.perf_counter() - began
    return fault


def _judge(fault: Fault, run: Callable[[], LevelVerdict], expected: Expected) -> None:
    """Hold the verdict of a run against what is expected of it."""
    fault.expected = list(expected.points)
    try:
        verdict = run()
    except UnsupportedError as error:
        fault.note = f"unsupported: {error}"
        return
    except TpshardError as error:
        fault.note = str(error)
        fault.levels.append(REFUSED)
        fault.caught = expected.refused
        return
    except Exception as error:  # a verifier that breaks down has not caught anything
        fault.note = f"the level forward broke down: {type(error).__name__}: {error}"
        return
    if fault.kind == EQUIVALENT:
        fault.caught = verdict.verdict == PASSED
        if not fault.caught:
            fault.note = verdict.findings[0].message if verdict.findings else f"the verdict is '{verdict.verdict}'"
        _worst(fault, verdict.measures)
        return
    failed = [measure for measure in verdict.measures if measure.status == "fail"]
    named = [measure for measure in failed if measure.kind not in FREE_RUNNING]
    _worst(fault, named or failed)
    if verdict.verdict != FAILED:
        fault.note = f"the verdict is '{verdict.verdict}'"
        return
    fault.levels.append("forward")
    fault.caught, fault.note = _placed(verdict, named, expected)


def _placed(verdict: LevelVerdict, named: list[Measure], expected: Expected) -> tuple[bool, str]:
    """Whether what failed is what should, and nothing else."""
    if not named:
        told = verdict.findings[0].message if verdict.findings else "nothing is named"
        # A rank whose shapes do not fit breaks off: what it passed last is before the fault, and in its layer.
        layers = {layer_of(point) for point in expected.points}
        broke = any(layer_of(finding.tensor) in layers for finding in verdict.findings if finding.tensor)
        told_of = expected.config and any(finding.file == CONFIG for finding in verdict.findings)
        return expected.refused or broke or told_of, told
    astray = [m for m in named if not _matches(m.point, expected)]
    if astray:
        return False, f"{astray[0].point} fails, which is not where the fault is"
    if expected.rank is not None and {m.rank for m in named} != {expected.rank}:
        return False, f"ranks {sorted({str(m.rank) for m in named})} are named, not {expected.rank}"
    return True, ""


def _matches(point: str, expected: Expected) -> bool:
    return any(fnmatchcase(point, pattern) for pattern in expected.points)


def _worst(fault: Fault, measures: list[Measure]) -> None:
    found = max(measures, key=excess, default=None)
    if found is not None:
        fault.point, fault.error, fault.gate = found.point, found.error, found.gate


def good_run(shards: Shards, source: Source, way: str) -> str:
    """"" where nothing is said about good shards, else what is."""
    levels: tuple[Callable[[], LevelVerdict], ...] = (
        lambda: plan_verdict(shards.manifest),
        lambda: run_forward(shards, source, way),
    )
    for level in levels:
        try:
            verdict = level()
        except Exception as error:  # whatever it is, it is no silence
            return f"{type(error).__name__}: {error}"
        if verdict.verdict != PASSED:
            text = verdict.findings[0].message if verdict.findings else "; ".join(verdict.notes)
            return f"{verdict.level} is '{verdict.verdict}': {text}"
    return ""
