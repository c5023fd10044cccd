"""The whole table put to the test: the tiny checkpoint split by it, run by its ranks, and merged."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tpshard.convert import merge, split
from tpshard.errors import TpshardError
from tpshard.planrules import plan_verdict
from tpshard.registry import given_table
from tpshard.shards import open_shards
from tpshard.source import open_source
from tpshard.verdicts import PASSED, worst

TOKENS = 12
BY_PLAN = "not reached by the run, and by plan: "  # how the level forward begins what plan says of unreached tensors


@dataclass
class Trial:
    """What came of one degree: ``problem`` is "" where everything held."""

    tp_size: int
    problem: str = ""
    merged: bool = False
    error: float = 0.0
    fraction: float = 0.0
    points: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    uncut: bool = False  # the degree is more than an axis has units
    misnamed: bool = False  # the ranks ran, and the level *plan* of verify does not take the roles for what they are


def tried(checkpoint: Path, table: Path, degrees: Sequence[int], *, trust_remote_code: bool = False) -> list[Trial]:
    """Split the checkpoint by the table at each degree, run the ranks zero-padded, and merge."""
    return [_tried(checkpoint, table, tp_size, trust_remote_code) for tp_size in degrees]


def without_paths(message: str, directory: Path) -> str:
    """A message that names no path below a directory which is gone when it is read."""
    return re.sub(rf"{re.escape(str(directory))}[\w./-]*", "the tiny checkpoint", message)


def _tried(checkpoint: Path, table: Path, tp_size: int, trust_remote_code: bool) -> Trial:
    from tpshard.numerics.forward import run_ranks
    from tpshard.numerics.ways import ZERO_PAD

    trial = Trial(tp_size)
    with tempfile.TemporaryDirectory(prefix="tpshard-derive-") as directory, given_table(table):
        shards, merged = Path(directory) / "shards", Path(directory) / "merged"
        try:
            report = split(checkpoint, shards, tp_size)
        except TpshardError as error:
            trial.problem = without_paths(str(error), checkpoint.parent)
            trial.uncut = "ranks cannot share the axis" in str(error)
            return trial
        try:
            opened = open_shards(shards)
            trial.fraction = report.sharded_fraction
            merge(shards, merged)
            trial.merged = _same(checkpoint, merged)
            verdict = run_ranks(
                opened, open_source(checkpoint), torch.float64, ZERO_PAD, tokens=TOKENS, min_coverage=0.0,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        except TpshardError as error:
            trial.problem = without_paths(without_paths(str(error), Path(directory)), checkpoint.parent)
            return trial
        trial.points, trial.collectives = len(verdict.measures), verdict.collectives
        measure = worst(verdict.measures)
        trial.error = measure.error if measure else 0.0
        if verdict.verdict != PASSED:
            trial.problem = verdict.findings[0].message if verdict.findings else f"the verdict is {verdict.verdict}"
            trial.misnamed = bool(verdict.findings) and all(BY_PLAN in found.message for found in verdict.findings)
        elif not trial.merged:
            trial.problem = "merging does not give the files that were split"
        else:
            plan = plan_verdict(opened.manifest)
            if plan.verdict != PASSED:
                trial.problem, trial.misnamed = f"plan: {plan.findings[0].message}", True
    return trial


def _same(checkpoint: Path, merged: Path) -> bool:
    names = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    return bool(names) and all((checkpoint / n).read_bytes() == (merged / n).read_bytes() for n in names)
