"""What the operations return: plain data with a versioned JSON form."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .verdicts import LevelVerdict

SCHEMA = 1


@dataclass
class Report:
    """Base of all reports: ``as_json`` is what ``--json`` prints."""

    verb: str

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values, with the schema's name and version."""
        values: dict[str, Any] = finite({"schema": f"tpshard.{self.verb}/{SCHEMA}", **asdict(self)})
        return values


def finite(value: Any) -> Any:
    """The value with NaN and infinities, for which JSON has no numbers, as the texts ``nan``, ``inf``, ``-inf``."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Conversion(Report):
    """What split, reshard or merge did, or with ``dry_run`` would do. Sizes are bytes."""

    source: str
    output: str
    family: str
    from_tp_size: int
    to_tp_size: int
    tensors: int
    dry_run: bool = False
    bytes_read: int = 0
    bytes_written: int = 0
    needed_bytes: int = 0
    bytes_kept: int = 0  # with --resume: written by an earlier run, and proven by digest
    rank_bytes: list[int] = field(default_factory=list)  # of tensors, by rank
    sharded_fraction: float = 0.0  # 1: everything is cut; 0: everything is on every rank
    uneven: list[str] = field(default_factory=list)
    held_whole: list[str] = field(default_factory=list)
    padding: list[str] = field(default_factory=list)
    needs_sum: list[str] = field(default_factory=list)  # patterns of norms along something cut
    added_once: list[str] = field(default_factory=list)  # patterns of biases whole on every rank
    copied_whole: list[str] = field(default_factory=list)  # tensors that no rule knew
    aliases: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    side_files: int = 0
    layout: str = ""
    content: str = ""
    algorithm: str = ""
    identical_to_source: bool | None = None  # merge: whether the weight files are the source's, byte for byte
    verification: Verification | None = None  # split: what the output passed before it became visible


@dataclass
class Export(Conversion):
    """What export did: an engine's layout of ``to_tp_size`` ranks a stage."""

    engine: str = ""
    version: str = ""  # of the engine, whose names these are
    pp_size: int = 1
    ep_size: int = 1
    stages: list[list[int]] = field(default_factory=list)  # layers [start, stop) of every stage


@dataclass
class Finding:
    """A difference that verification found."""

    level: str
    file: str
    tensor: str
    message: str


@dataclass
class Verification(Report):
    """The verdict of ``verify``: passed only if levels were run and none found anything."""

    shards: str
    against: str | None
    tp_size: int
    levels: list[str] = field(default_factory=list)
    passed: bool = False
    findings: list[Finding] = field(default_factory=list)
    files_checked: int = 0
    tensors_checked: int = 0
    bytes_checked: int = 0
    warnings: list[str] = field(default_factory=list)
    verdicts: list[LevelVerdict] = field(default_factory=list)  # one a level that was asked for
    gates: dict[str, Any] = field(default_factory=dict)  # what the run was judged by
    versions: dict[str, str] = field(default_factory=dict)  # of tpshard, python, torch, ... as far as they took part
    hardware: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    rank_bytes: list[int] = field(default_factory=list)  # of tensors, by rank
    status: int = 1  # the exit status that is due
    baseline: dict[str, Any] = field(default_factory=dict)  # what a baseline was compared with, if one was given


@dataclass
class Degree:
    """What one degree costs: bytes of tensors on each rank, padding and replication included."""

    tp_size: int
    possible: bool
    equal: bool = False
    reason: str = ""
    rank_bytes: list[int] = field(default_factory=list)
    sharded_fraction: float = 0.0
    uneven: list[str] = field(default_factory=list)
    held_whole: list[str] = field(default_factory=list)
    padding: list[str] = field(default_factory=list)


@dataclass
class Survey(Report):
    """What ``inspect`` and ``plan`` tell of a checkpoint or of shards."""

    path: str
    kind: str  # "checkpoint", "adapter" or "shards"
    family: str
    model_type: str
    tensors: int
    bytes: int
    dtypes: dict[str, int] = field(default_factory=dict)  # bytes by dtype
    files: list[str] = field(default_factory=list)
    tp_size: int = 1
    axes: dict[str, str] = field(default_factory=dict)
    equal_degrees: list[int] = field(default_factory=list)
    largest_degree: int = 1  # 0 where it is not known: of an adapter without its base model
    degrees: list[Degree] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    needs_sum: list[str] = field(default_factory=list)
    added_once: list[str] = field(default_factory=list)
    copied_whole: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def sharded_fraction(rank_bytes: list[int], total: int) -> float:
    """``(1 - mean rank bytes / total) / (1 - 1 / ranks)``: 1.0 where everything is cut and nothing replicated."""
    ranks = len(rank_bytes)
    if ranks < 2 or not total:
        return 1.0 if total else 0.0
    return (1 - sum(rank_bytes) / ranks / total) / (1 - 1 / ranks)


@dataclass
class Entry:
    """A family or engine, and the model types or versions that it serves."""

    name: str
    serves: list[str]
    summary: str = ""


@dataclass
class Listing(Report):
    """What ``list`` lists."""

    what: str
    entries: list[Entry] = field(default_factory=list)


@dataclass
class Rollback(Report):
    """What ``rollback`` did: ``kept`` is where what the output held until then lies now, None where it held nothing."""

    output: str
    kept: str | None
    notes: list[str] = field(default_factory=list)


@dataclass
class Step:
    """One conversion of the demonstration; ``nbytes`` are those of the weight files."""

    name: str
    tp_size: int
    files: int
    nbytes: int
    seconds: float


@dataclass
class Check:
    """A claim of the demonstration and whether it held."""

    claim: str
    passed: bool


@dataclass
class Demonstration(Report):
    """What ``demo`` did and proved; ``directory`` is "" where nothing was kept."""

    directory: str
    passed: bool = False
    steps: list[Step] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


@dataclass
class Fault:
    """A fault that the self-test planted, and who saw it.

    Args:
        kind: ``resealed`` (digests made to fit), ``unsealed``, ``plan`` (cut consistently by a wrong
            plan), or ``equivalent`` (the same model in other bytes, about which nothing may be said).
        way: how ranks were run.
        levels: levels that saw it; ``refused`` where a clear error came instead of a verdict.
        expected: patterns of the points that may fail.
        point: the worst of those that did, with its error and gate.
        caught: seen by every level that must, and at its place.
    """

    name: str
    says: str
    kind: str
    family: str
    tp_size: int
    way: str
    levels: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    point: str = ""
    error: float = 0.0
    gate: float = 0.0
    caught: bool = False
    note: str = ""
    seconds: float = 0.0


@dataclass
class SelfTest(Report):
    """What ``selftest`` planted and who saw it: passed only if every fault was caught and no good run alarmed."""

    passed: bool = False
    quick: bool = False
    families: list[str] = field(default_factory=list)
    kinds: int = 0  # different faults, equivalents left out
    planted: int = 0
    caught: int = 0
    good_runs: int = 0
    alarms: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)  # faults that had no place in the families that were run
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
