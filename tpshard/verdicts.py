"""What a level of verification found, as plain data: no torch, no files.

A :class:`Measure` is one number beside its gate; a :class:`LevelVerdict` is all that one level says.
The engines of ``tpshard.numerics`` and :mod:`tpshard.planrules` fill them in, :mod:`tpshard.gates`
judges them against a baseline, and :mod:`tpshard.outputs` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from .reports import Finding

PASSED, FAILED, UNSUPPORTED, SOURCE_NAN, NOT_RUN = "passed", "failed", "unsupported", "source_nan", "not_run"
VERDICTS = (PASSED, FAILED, UNSUPPORTED, SOURCE_NAN, NOT_RUN)
KINDS = ("sum", "gather", "replicated", "rows", "probe", "gradient", "logits")
STATUSES = ("pass", "fail", "drift", "skip")


@dataclass
class Measure:
    """One error beside its gate.

    Args:
        point: module path at which it was taken (``model.layers.3.self_attn.o_proj``).
        block: the block that a reader would look at (``model.layers.3.self_attn``).
        kind: one of :data:`KINDS`.
        rank: the rank that it is of, None where the ranks' tensors were summed or gathered.
        error: relative L2 error, teacher forced: every rank ran on the reference's input.
        free: the same where the ranks ran on their own stream, None where that was not run.
        max_abs: largest absolute difference.
        gate: what ``error`` may not exceed.
        status: one of :data:`STATUSES`.
    """

    point: str
    block: str
    kind: str
    rank: int | None
    error: float
    free: float | None
    max_abs: float
    gate: float
    status: str
    note: str = ""


@dataclass
class LevelVerdict:
    """What one level says.

    Args:
        verdict: one of :data:`VERDICTS`; ``source_nan``: the source holds NaN or Inf, which is neither
            a pass nor a mismatch.
        mode: how a rank was run, ``zero-pad`` or ``local``; "" where none was.
        coverage: the part of the parameters that was exercised, 0 to 1; None where it was not measured.
        unreached: tensors that were not exercised, and so compared by bytes (and their cuts by plan) only.
        collectives: how many collectives of each kind one forward pass took (*backward*: of both ways).
        collective_bytes_per_token: what a forward pass exchanges; see :mod:`tpshard.traffic`.
        collective_dtype: the dtype in which those bytes are counted, by its safetensors name.
        ran_on: what the level ran on where that is not always the model (``its first 2 layers``).
        logits: figures for people: ``max_abs``, ``rel_l2``, ``kl``, ``top1``, ``top5``, ``perplexity``.
        seconds: wall time; ``peak_memory`` in bytes, 0 where it was not measured.
    """

    level: str
    verdict: str
    mode: str = ""
    measures: list[Measure] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    coverage: float | None = None
    unreached: list[str] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    collective_bytes_per_token: float | None = None
    collective_dtype: str = ""
    logits: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory: int = 0
    notes: list[str] = field(default_factory=list)
    ran_on: str = ""


def within(error: float, gate: float) -> bool:
    """Whether an error passes its gate: NaN and Inf never do, whatever the gate."""
    return math.isfinite(error) and error <= gate


def worst(measures: Iterable[Measure]) -> Measure | None:
    """The measure that is furthest over (or least under) its gate; NaN counts as furthest. None of none."""
    return max(measures, key=excess, default=None)


def excess(measure: Measure) -> float:
    """``error / gate``: above 1 where the gate is passed over; infinite for NaN, Inf and a gate of 0 with an error."""
    if not math.isfinite(measure.error):
        return math.inf
    if measure.gate <= 0:
        return 0.0 if measure.error == 0 else math.inf
    return measure.error / measure.gate
