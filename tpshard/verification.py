"""All levels of proof under one call: bytes, the plan, and the ranks run as a model.

Every level that is asked for gets its own verdict. Passed means that each of them passed and that there
was at least one; what could not be run is never counted as a pass.
"""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .accounting import bytes_by_rank
from .adapterplan import adapter_plan_verdict
from .check import BROKEN, compare_headers
from .check import LEVELS as BYTE_LEVELS
from .check import verify as check
from .errors import TpshardError, UnsupportedError, UsageError
from .gates import Gates, Settings, expanded
from .options import DEFAULTS, Options
from .planrules import plan_verdict
from .reports import Finding, Verification
from .shards import Shards, given_path, is_shards, open_shards, read_manifest
from .source import Source, open_source
from .verdicts import FAILED, NOT_RUN, PASSED, SOURCE_NAN, UNSUPPORTED, LevelVerdict

_ADAPTER = (
    "an adapter is no model that could be run: verify the shards of its base model at this level, and the adapter's at "
    "structure, digest, bytes and plan"
)
NUMERIC = ("twin", "forward", "backward", "runtime")
NEED_SOURCE = ("bytes", "forward", "runtime")  # twin needs none, backward runs on the twin without


@dataclass(frozen=True)
class Run:
    """How the numeric levels run.

    Args:
        device: ``cpu`` or ``cuda``.
        text: a file of text for the perplexity, None for none.
        trust_remote_code: run code that lies in the checkpoint.
        seed: of the inputs.
        command: the words of the command line, for the report.
    """

    device: str = "cpu"
    text: str | None = None
    trust_remote_code: bool = False
    seed: int = 0
    command: Sequence[str] = field(default_factory=tuple)


_USUAL, _RUN = Settings(), Run()


def verify(
    shards: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    levels: Sequence[str] | None = None,
    options: Options = DEFAULTS,
    settings: Settings = _USUAL,
    run: Run = _RUN,
) -> Verification:
    """Check a directory of shards at the given levels; by default by bytes and by plan, as far as the call allows.

    ``against`` is the source checkpoint (a directory or hub id); for the levels that run no model also other
    shards of the same model. Levels that read no weights of it still hold names, dtypes and shapes against it.
    ``levels`` may name groups (``quick``, ``standard``, ``full``) and counts before ``settings.levels``.
    Differences are findings of the report, not errors; a level that cannot run has a verdict that says why,
    and the report's ``status`` is the exit status that is due.

    Raises:
        UsageError: an unknown level, one that needs ``against``; ``shards`` is no finished split.
        DamagedError: the manifest, or the source, cannot be read for what it is.
        StorageError: reading failed.
    """
    asked = expanded(levels) if levels else settings.levels
    wanted = asked or ("structure", "digest", *(("bytes",) if against is not None else ()), "plan")
    for level in wanted:
        if level in NEED_SOURCE and against is None:
            raise UsageError(f"the level '{level}' compares with the source: name it with --against SRC")
    root = given_path(shards, "the shards")
    manifest = read_manifest(root)
    by_bytes = [level for level in wanted if level in BYTE_LEVELS]
    compared = against if "bytes" in by_bytes else None
    report = check(root, against=compared, levels=by_bytes or ("structure",), options=options)
    report.shards, report.against = str(shards), None if against is None else str(against)
    report.command = list(run.command)
    report.versions = {"tpshard": _version("tpshard"), "python": platform.python_version()}
    report.hardware = _hardware()
    _complete(report, wanted)
    if "plan" in wanted:
        _add(report, adapter_plan_verdict(manifest) if manifest.is_adapter else plan_verdict(manifest))
    sound = all(verdict.verdict == PASSED for verdict in report.verdicts if verdict.level == "structure")
    opened = open_shards(root) if sound else None
    other = (
        against is not None
        and not any(level in NEED_SOURCE for level in wanted)
        and _is_another(report, compare_headers(manifest, against))
    )
    report.rank_bytes = bytes_by_rank(opened.placed) if opened is not None else []
    numeric = [level for level in wanted if level in NUMERIC]
    if numeric:
        why = "the structure is wrong" if opened is None else f"{against} is not the source of these shards"
        _numeric(report, numeric, None if other else opened, why, against, options, settings, run)
    _tell_not_run(report, broken=not sound)
    excused = ("digest",) if asked is None and not manifest.algorithm else ()
    _judge(report, [level for level in wanted if level not in excused])
    return report


def _complete(report: Verification, wanted: Sequence[str]) -> None:
    """Give every byte level that was asked for a verdict, whether it ran or not."""
    told = {verdict.level for verdict in report.verdicts}
    for level in wanted:
        if level in BYTE_LEVELS and level not in told:
            text = "not run: the structure is wrong"
            report.verdicts.append(LevelVerdict(level, NOT_RUN, notes=[text]))


def _is_another(report: Verification, found: list[Finding]) -> bool:
    """Whether tensors differ from the source's by name, dtype or shape; if so the structure fails by that."""
    if found:
        verdict = next(verdict for verdict in report.verdicts if verdict.level == "structure")
        verdict.verdict = FAILED
        verdict.findings += found
        report.findings += found
    return bool(found)


def _tell_not_run(report: Verification, *, broken: bool) -> None:
    """One note for all levels that a wrong structure kept from running, whoever runs them."""
    if broken:
        missing = [verdict.level for verdict in report.verdicts if verdict.verdict == NOT_RUN]
        report.warnings = [text for text in report.warnings if not text.startswith(BROKEN)]
        report.warnings += [f"{BROKEN}: {', '.join(missing)}"] if missing else []


def _add(report: Verification, verdict: LevelVerdict) -> None:
    report.levels.append(verdict.level)
    report.verdicts.append(verdict)
    report.findings += verdict.findings


def _numeric(
    report: Verification, levels: Sequence[str], shards: Shards | None, why: str,
    against: str | os.PathLike[str] | None, options: Options, settings: Settings, run: Run,
) -> None:  # fmt: skip
    """Run the levels on ``shards``; where there are none, ``why`` says why not."""
    gates = settings.gates
    report.gates = {
        "compute": settings.compute, "mode": settings.mode, "tokens": settings.tokens,
        "min_coverage": settings.min_coverage, **gates.as_json(settings.compute),
    }  # fmt: skip
    if shards is None:
        report.verdicts += [LevelVerdict(level, NOT_RUN, notes=[f"not run: {why}"]) for level in levels]
        return
    if shards.manifest.is_adapter:
        report.verdicts += [LevelVerdict(level, UNSUPPORTED, notes=[_ADAPTER]) for level in levels]
        return
    source = None
    if against is not None:
        if is_shards(against):
            raise UsageError(f"{against} holds shards; the levels {', '.join(levels)} need the checkpoint itself")
        source = open_source(against)
    arguments = {
        "compute": settings.compute, "mode": settings.mode, "tokens": settings.tokens,
        "max_memory": options.max_memory, "device": run.device, "min_coverage": settings.min_coverage,
        "seed": run.seed, "gates": gate_function(gates, settings.compute), "progress": None,
        "trust_remote_code": run.trust_remote_code, "text": run.text,
    }  # fmt: skip
    for level in levels:
        began = time.perf_counter()
        try:
            report.versions |= _require()
            verdict = _run_level(level, shards, source, arguments)
        except UsageError:
            raise
        except UnsupportedError as error:
            verdict = LevelVerdict(level, UNSUPPORTED, notes=[str(error)])
        except TpshardError as error:
            verdict = LevelVerdict(level, NOT_RUN, notes=[str(error)])
            report.status = max(report.status, error.exit_status)
        verdict.seconds = verdict.seconds or time.perf_counter() - began
        _add(report, verdict)
    if run.device == "cuda" and "torch" in report.versions:
        report.hardware["device"] = _cuda_name()


def _run_level(level: str, shards: Shards, source: Source | None, arguments: dict[str, Any]) -> LevelVerdict:
    """Call ``tpshard.numerics.LEVEL.LEVEL`` with what it takes; what it does not take must not have been asked for."""
    from .numerics import INSTALL

    name = f"{__package__}.numerics.{level}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise UnsupportedError(
                f"the level '{level}' needs {error.name}, which is not installed: {INSTALL}"
            ) from None
        raise UnsupportedError(f"this installation of tpshard has no level '{level}'; install a newer one") from None
    except (ImportError, OSError, RuntimeError) as error:  # parts of transformers are imported as they are needed
        raise UnsupportedError(
            f"the level '{level}' cannot be loaded ({type(error).__name__}: {str(error).strip()[:300]}); "
            f"install torch and transformers again: {INSTALL}"
        ) from None
    function: Callable[..., LevelVerdict] = getattr(module, level)
    takes = inspect.signature(function).parameters
    if arguments["text"] is not None and "text" not in takes:
        raise UsageError(f"the level '{level}' takes no text: leave --text away, or ask for another level")
    return function(shards, source, **{key: value for key, value in arguments.items() if key in takes})


def gate_function(gates: Gates, compute: str) -> Callable[[str, float], float]:
    """Given a point and the gate that it would have, the gate that it has.

    An override of :class:`Gates` matches the point or any module around it.
    """
    usual, mine = Gates(), gates

    def gate(point: str, default: float) -> float:
        names = point.split(".")
        around = [".".join(names[:end]) for end in range(len(names), 0, -1)]
        for casts in (False, True):
            if default == usual.of(compute, fp32_inside=casts):
                found = mine.of(compute, *around, fp32_inside=casts)
                return default if found is None else found
        override = mine.override(compute, *around)
        return default if override is None else override

    return gate


def _judge(report: Verification, wanted: Sequence[str]) -> None:
    """Passed if every level that was asked for passed; the exit status is that of the worst."""
    verdicts = {verdict.level: verdict.verdict for verdict in report.verdicts}
    report.levels = [verdict.level for verdict in report.verdicts if verdict.verdict != NOT_RUN]
    for verdict in report.verdicts:
        if verdict.verdict == FAILED and not verdict.findings:
            text = "; ".join(verdict.notes) or "no more is known"
            verdict.findings.append(Finding(verdict.level, "", "", f"the level {verdict.level} failed: {text}"))
            report.findings += verdict.findings
    report.passed = not report.findings and bool(wanted) and all(verdicts.get(level) == PASSED for level in wanted)
    if report.passed:
        report.status = 0
    elif report.findings or FAILED in verdicts.values():
        report.status = 1
    elif SOURCE_NAN in verdicts.values():
        report.status = 4
    elif UNSUPPORTED in verdicts.values():
        report.status = report.status or 3
    else:
        report.status = report.status or 1


def _require() -> dict[str, str]:
    from .numerics import require

    return require()


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _hardware() -> dict[str, str]:
    """Machine and processor, as far as the system tells."""
    name = platform.processor() or ""
    if sys.platform == "linux":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return {"machine": platform.machine(), "processor": name or "unknown"}


def _cuda_name() -> str:
    import torch

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else "none"
