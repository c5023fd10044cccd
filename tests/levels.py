"""A level *forward* that gives what a test wants, in place of the real one."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tpshard import verification
from tpshard.reports import Finding
from tpshard.verdicts import LevelVerdict, Measure


def forward_gives(monkeypatch: pytest.MonkeyPatch, verdict: LevelVerdict | Exception) -> list[dict[str, Any]]:
    """Let the level forward give this; returns what it was called with."""
    calls: list[dict[str, Any]] = []

    def forward(shards: Any, source: Any, **arguments: Any) -> LevelVerdict:
        calls.append(arguments)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    monkeypatch.setattr(verification, "_require", lambda: {"torch": "2.13.0", "transformers": "5.24.0"})
    module = type(sys)("tpshard.numerics.forward")
    # the level is called with what it takes
    module.forward = lambda shards, source, *, compute, tokens, gates, device: forward(  # type: ignore[attr-defined]
        shards, source, compute=compute, tokens=tokens, gates=gates, device=device
    )
    monkeypatch.setitem(sys.modules, "tpshard.numerics.forward", module)
    return calls


def ran(verdict: str = "passed", **more: Any) -> LevelVerdict:
    error = 1e-15 if verdict == "passed" else 0.5
    status = "pass" if verdict == "passed" else "fail"
    measure = Measure("model.norm", "model", "sum", None, error, None, error, 1e-10, status)
    findings = [] if verdict == "passed" else [Finding("forward", "", "model.norm", "model.norm is off by 0.5")]
    return LevelVerdict("forward", verdict, "zero-pad", [measure], findings, 1.0, **more)
