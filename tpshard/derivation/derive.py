"""Derive a table: experiment, draft, proof, and what came of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpshard.errors import TpshardError, UnsupportedError, UsageError
from tpshard.listing import shown
from tpshard.strictjson import parse_object
from tpshard.table import template_of

from .draft import Draft, Drafter, RuleDraft
from .noise import experiments
from .numbers import Numbers, defaults
from .probe import Probe
from .proof import Trial, tried, without_paths
from .specimens import Specimens
from .structure import Structure, structure
from .sums import meeting
from .writing import Origin, written

DEGREES = (2, 3, 4)
ATTEMPTS = 3


@dataclass
class Derivation:
    """A derived table and how it stands the proof.

    ``text`` is the table's source; ``whole`` are patterns of tensors left whole, and why; ``remarks`` what could
    not be told of a number. ``fraction`` is the smallest sharded fraction over the degrees that were tried.
    """

    source: str
    model_type: str
    class_name: str
    text: str = ""
    trials: list[Trial] = field(default_factory=list)
    axes: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    spanning: list[str] = field(default_factory=list)
    experiments: int = 0
    seconds: float = 0.0

    @property
    def proven(self) -> bool:
        """Whether the ranks ran as the original at every degree that its axes can serve, and at one at least."""
        ran = [trial for trial in self.trials if not trial.uncut]
        return bool(ran) and all(not trial.problem for trial in ran)

    @property
    def fraction(self) -> float:
        return min((trial.fraction for trial in self.trials if not trial.uncut), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "source": self.source, "model_type": self.model_type, "class": self.class_name, "proven": self.proven,
            "sharded_fraction": self.fraction, "axes": self.axes, "whole": self.whole, "remarks": self.remarks,
            "needs_sum": self.spanning, "experiments": self.experiments,
            "seconds": round(self.seconds, 2), "table": self.text,
            "trials": [vars(trial) for trial in self.trials],
        }  # fmt: skip


def derive(
    source: Path,
    *,
    trust_remote_code: bool = False,
    degrees: Sequence[int] = DEGREES,
    note: Callable[[str], None] = lambda message: None,
) -> Derivation:
    """Work out the table of the model in ``source``, a directory with at least its ``config.json``.

    No table that is installed is asked.

    Raises:
        UsageError: there is no config, or a degree that makes no sense.
        UnsupportedError: transformers has no class for it, or it does not run small on the CPU.
    """
    started = time.monotonic()
    path = source / "config.json"
    if not path.is_file():
        raise UsageError(f"{shown(source)} has no config.json; give a checkpoint's directory, or one with its config")
    if not degrees or min(degrees) < 2:
        raise UsageError("nothing is cut below a degree of 2; give degrees from 2")
    values = parse_object(path.read_bytes(), shown(path), "Restore it.")
    code = sorted(source.glob("*.py")) if trust_remote_code else []
    with tempfile.TemporaryDirectory(prefix="tpshard-derive-") as directory:
        note("building it small")
        try:
            specimens = Specimens(values, Path(directory), code, trust_remote_code=trust_remote_code)
            found = _Finder(specimens, trust_remote_code, note).found()
        except TpshardError as error:
            raise type(error)(without_paths(str(error), Path(directory))) from None
        derivation = Derivation(str(source), str(values.get("model_type", "")), found.origin.class_name)
        _prove(derivation, specimens, found, degrees, Path(directory), trust_remote_code, note)
    derivation.seconds = time.monotonic() - started
    return derivation


@dataclass
class _Found:
    origin: Origin
    structures: list[Structure]
    shapes: list[dict[str, tuple[int, ...]]]
    numbers: Numbers
    tied: list[tuple[str, str]]
    differs: bool
    experiments: int


class _Finder:
    """Runs the experiments on every specimen."""

    def __init__(self, specimens: Specimens, trust_remote_code: bool, note: Callable[[str], None]) -> None:
        self.specimens, self.trusted, self.note = specimens, trust_remote_code, note
        self.made = 0

    def found(self) -> _Found:
        import transformers

        structures, shapes, tied = [], [], []
        origin: Origin | None = None
        for root in self.specimens.roots:
            probe = Probe(root, trust_remote_code=self.trusted)
            self.note(f"what feeds what in {type(probe.model).__name__}")
            if any(".experts." in name for name in probe.shapes):  # each must get a token
                probe.more()
            met = meeting(probe)
            one = structure(probe, met)
            if one.silent:  # a rectifier was off for all tokens, or an expert got none
                probe.more()
                one = structure(probe, met)
            tests = experiments(probe, met, one)
            self.made += tests.made
            odd = {n: tests.failed[a.sums] for a in one.axes if a.sums in tests.failed for n in a.tensors}
            structures.append(replace(one, axes=[a for a in one.axes if a.sums not in tests.failed], odd=one.odd | odd))
            shapes.append(probe.shapes)
            if origin is None:
                cls = type(probe.model)
                origin = Origin(probe.model.config.model_type, cls.__name__, cls.__module__, transformers.__version__)
                tied = _tied(probe)
        assert origin is not None
        numbers = Numbers([self.specimens.as_dict(root) for root in self.specimens.roots])
        return _Found(origin, structures, shapes, numbers, tied, self.specimens.differs, self.made)


def _tied(probe: Probe) -> list[tuple[str, str]]:
    """Parameters that are another one and are not stored, with that one's name on disk."""
    out = []
    for alias, target in probe.skeleton.aliases.items():
        recipe = probe.skeleton.recipes[target]
        if recipe.plain and alias not in probe.shapes:
            out.append((alias, recipe.tensors[0][0]))
    return out


def _drafted(
    specimens: Specimens, found: _Found, without: frozenset[frozenset[str]], plain: bool
) -> tuple[Draft, str]:
    structures = [replace(s, axes=[axis for axis in s.axes if axis.sums not in without]) for s in found.structures]
    draft = Drafter(structures, found.shapes, found.numbers, found.tied, plain).make()
    for alias, target in found.tied:
        rule = next((r for r in draft.rules if r.name == target), None)
        if rule is not None:
            head = "head" if len(rule.dims) > 1 else "head_bias"
            draft.rules.append(RuleDraft(alias, list(rule.dims), head, optional=True, cut=rule.cut))
    keys = list(dict.fromkeys(key for e in draft.used for key in e.keys))
    known = defaults(keys, lambda key: [specimens.without(root, key) for root in specimens.roots], found.numbers)
    return draft, formatted(written(draft, found.origin, known))


def _prove(
    derivation: Derivation,
    specimens: Specimens,
    found: _Found,
    degrees: Sequence[int],
    directory: Path,
    trust_remote_code: bool,
    note: Callable[[str], None],
) -> None:
    """Draft, and try; what fails is left whole, and tried again."""
    without: frozenset[frozenset[str]] = frozenset()
    reasons: dict[str, str] = {}
    table = directory / "derived_table.py"
    patterns = found.structures[0].patterns
    plain = False
    for _ in range(ATTEMPTS):
        draft, text = _drafted(specimens, found, without, plain)
        table.write_text(text, encoding="utf-8")
        note(f"running its ranks at {', '.join(map(str, degrees))}")
        derivation.trials = tried(specimens.roots[0], table, degrees, trust_remote_code=trust_remote_code)
        derivation.text = text
        if not plain and any(trial.misnamed for trial in derivation.trials):
            note(f"with plainer roles, for {next(t.problem for t in derivation.trials if t.misnamed)}")
            plain = True  # names are hints: what the experiments say stands, and roles say no more than that
            continue
        blamed = _blamed(derivation.trials, found.structures[0], without)
        if not blamed:
            break
        for axis, why in blamed.items():
            for one in found.structures[0].axes:
                if one.sums == axis:
                    reasons |= {patterns.of(name): f"its ranks did not add up: {why}" for name in one.tensors}
        without |= frozenset(blamed)
    derivation.axes = [
        f"{a.name}: {a.units.source}" + (f" over {a.groups.source}" if a.groups else "") for a in draft.axes
    ]
    derivation.whole = _left(draft, found) | reasons
    derivation.experiments = found.experiments
    derivation.remarks = list(dict.fromkeys(draft.remarks))
    derivation.spanning = sorted({patterns.of(name) for name in found.structures[0].spanning})
    if not found.differs:
        derivation.remarks.append(
            "no second config with other numbers ran: which key a number follows was told by its value alone"
        )


def _left(draft: Draft, found: _Found) -> dict[str, str]:
    """Matrices that stayed whole, and why."""
    out = dict(draft.whole)
    for name, why in found.structures[0].odd.items():
        out.setdefault(found.structures[0].patterns.of(name), why)
    for rule in draft.rules:
        if not rule.cut and len(rule.dims) > 1:
            out.setdefault(rule.name.replace("{layer}", "#").replace("{expert}", "#"), "nothing that is cut meets it")
    return out


def _blamed(trials: Sequence[Trial], first: Structure, without: frozenset[frozenset[str]]) -> dict[frozenset[str], str]:
    """The axes at whose sums a trial failed."""
    out: dict[frozenset[str], str] = {}
    for trial in trials:
        if not trial.problem or trial.uncut or trial.misnamed:
            continue
        for axis in first.axes:
            modules = {name.rpartition(".")[0] for name in axis.sums}
            if axis.sums not in without and any(
                m and m in template_of(trial.problem.replace(" ", "."))[0] for m in modules
            ):
                out[axis.sums] = trial.problem[:200]
    return out


def formatted(text: str) -> str:
    """The text as ruff formats it, where ruff is installed; else as it is."""
    ruff = shutil.which("ruff") or shutil.which("ruff", path=str(Path(sys.executable).parent))
    if ruff is None:
        return text
    done = subprocess.run(
        [ruff, "format", "--line-length", "120", "-"], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UnsupportedError(f"the derived table is no Python: {done.stderr.strip()[:300]}")
    return done.stdout
