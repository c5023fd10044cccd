"""What a tiny checkpoint of an architecture goes through: cut to degrees, joined, re-cut, and run by its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tpshard.checkpoint import open_checkpoint
from tpshard.convert import merge, reshard, split
from tpshard.degrees import largest_degree
from tpshard.errors import TpshardError, UnsupportedError
from tpshard.numerics.forward import run_ranks
from tpshard.numerics.ways import ZERO_PAD
from tpshard.planrules import plan_verdict
from tpshard.registry import family_of, table_for
from tpshard.shards import open_shards
from tpshard.source import open_source
from tpshard.table import template_of
from tpshard.verdicts import FAILED, PASSED

from .models import write

DEGREES = (1, 2, 3, 4, 5, 8)


@dataclass
class Outcome:
    """What came of it; ``problems`` is empty where all is well.

    Args:
        degrees: those that were tried: the ones asked for up to the largest, and the largest.
        sharded: the sharded fraction of the tiny model by degree.
        error: the largest relative error at any point of any forward run; ``gate``: the widest gate there.
        coverage: the least part of the parameters that a forward run reached.
        collectives: of one forward pass at the last degree.
        whole: name patterns of tensors that stay whole, with the reason that the table gives.
        unsupported: why the ranks cannot be run here, "" where they were.
    """

    model_type: str
    task: str
    variant: str
    family: str = ""
    made: str = ""
    layers: int = 0
    largest: int = 0
    degrees: list[int] = field(default_factory=list)
    sharded: dict[int, float] = field(default_factory=dict)
    error: float | None = None
    gate: float | None = None
    coverage: float | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unsupported: str = ""


def check(
    model_type: str,
    directory: Path,
    *,
    task: str = "causal",
    variant: str = "",
    degrees: Sequence[int] = DEGREES,
    run_at: Sequence[int] = (2, 3, 8),
    tokens: int = 12,
) -> Outcome:
    """Put one architecture through all of it.

    Args:
        degrees: to be cut to, as far as the model can be; its largest degree is always added.
        run_at: those of them at which the ranks are run; the largest is run too where none of them is.
    """
    out = Outcome(model_type, task, variant)
    source = directory / "model"
    try:
        out.made = write(model_type, source, task, variant).__name__
    except Exception as error:  # what transformers itself cannot make or save
        out.unsupported = f"transformers: {type(error).__name__}: {' '.join(str(error).split()):.200}"
        return out
    try:
        checkpoint = open_checkpoint(source)
    except TpshardError as error:
        out.problems.append(str(error))
        return out
    out.family = family_of(checkpoint.source.config)
    out.layers = sum(stack.layers for stack in table_for(checkpoint.source.config).stacks)
    out.largest = largest_degree(checkpoint.axes)
    out.degrees = sorted({degree for degree in degrees if degree <= out.largest} | {out.largest})
    for name, dims in checkpoint.matched.dims.items():
        if not any(dim.axes for dim in dims) and name in checkpoint.matched.rules:
            rule = checkpoint.matched.rules[name]
            out.whole[template_of(name)[0]] = rule.note.removeprefix("whole: ") or rule.role
    run = [degree for degree in out.degrees if degree in run_at and degree > 1] or [d for d in [out.largest] if d > 1]
    before: Path | None = None
    for degree in out.degrees:
        try:
            before = _one(out, source, directory, degree, before)
            if degree in run and not out.unsupported:
                _run(out, source, directory / f"tp{degree}", tokens)
        except TpshardError as error:
            out.problems.append(f"TP {degree}: {error}")
    return out


def _one(out: Outcome, source: Path, directory: Path, degree: int, before: Path | None) -> Path:
    """Split, merge, and reshard from the degree before; returns where the shards are."""
    shards = directory / f"tp{degree}"
    report = split(source, shards, degree)
    if report.sharded_fraction is not None:
        out.sharded[degree] = report.sharded_fraction
    merge(shards, directory / f"merged{degree}")
    if _weights(directory / f"merged{degree}") != _weights(source):
        out.problems.append(f"TP {degree}: merged back, the weights are others")
    if before is not None:
        reshard(before, directory / f"re{degree}", degree)
        if _weights(directory / f"re{degree}") != _weights(shards):
            out.problems.append(f"{before.name} -> TP {degree}: resharded, the ranks' files are others than split ones")
    verdict = plan_verdict(open_shards(shards).manifest)
    if verdict.verdict == FAILED:
        out.problems.append(f"TP {degree}: {verdict.findings[0].message}")
    return shards


def _run(out: Outcome, source: Path, shards: Path, tokens: int) -> None:
    opened = open_shards(shards)
    try:
        verdict = run_ranks(opened, open_source(source), torch.float64, ZERO_PAD, tokens=tokens)
    except UnsupportedError as error:
        out.unsupported = str(error)
        return
    if verdict.verdict != PASSED:
        why = verdict.findings[0].message if verdict.findings else "; ".join(verdict.notes)
        out.problems.append(f"{shards.name}: {verdict.verdict}: {why}")
    for measure in verdict.measures:
        if measure.kind != "logits":
            out.error = max(out.error or 0.0, measure.error)
            out.gate = max(out.gate or 0.0, measure.gate)
    if verdict.coverage is not None:
        out.coverage = min(1.0 if out.coverage is None else out.coverage, verdict.coverage)
    out.collectives = dict(verdict.collectives)


def _weights(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.safetensors"))
    }
