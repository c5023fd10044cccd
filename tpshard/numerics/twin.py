"""Level *twin*: a tiny random model of the same class, cut by the same table at the same degree, in fp64.

It says whether the table of this family is one that a rank can run, and whether the verifier can run this
class at all, and in which ways. It says nothing about a checkpoint: a twin that fails is "unsupported".
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tpshard.convert import split
from tpshard.errors import TpshardError, UnsupportedError
from tpshard.listing import shown
from tpshard.shards import Shards, open_shards
from tpshard.source import Source, open_source
from tpshard.strictjson import parse_config
from tpshard.verdicts import PASSED, UNSUPPORTED, LevelVerdict, worst

from .skeleton import model_class, read_config
from .twinconfig import shrunk
from .ways import LOCAL, ZERO_PAD

LEVEL = "twin"
TOKENS = 12
SCALE = 0.2  # of random matrices; small enough that no softmax saturates
MOST_PARAMETERS = 30_000_000


@dataclass(frozen=True)
class Trial:
    """What trying a twin gave: for every way to run a rank "" or why it fails; ``ran``: the twin could be built."""

    problems: dict[str, str]
    ran: bool
    verdicts: dict[str, LevelVerdict] = field(default_factory=dict)


_trials: dict[str, Trial] = {}
_lock = threading.Lock()


def twin(
    shards: Shards,
    source: Source | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    trust_remote_code: bool = False,
) -> LevelVerdict:
    """Run the level on the twin of ``shards``; ``source`` is not needed.

    The verdict's mode is the strongest way that passes; its notes say which do and why others do not.

    Raises:
        UnsupportedError: transformers has no class for the config.
    """
    started = time.monotonic()
    if progress is not None:
        progress(LEVEL)
    trial = tried(shards, trust_remote_code=trust_remote_code)
    passing = [mode for mode in (LOCAL, ZERO_PAD) if not trial.problems[mode]]
    mode = passing[0] if passing else ""
    verdict = deepcopy(trial.verdicts[mode]) if mode else LevelVerdict(LEVEL, UNSUPPORTED)
    verdict.level = LEVEL
    verdict.notes += [f"the twin passes {mode}" for mode in passing]
    verdict.notes += [f"the twin does not pass {mode}: {why}" for mode, why in trial.problems.items() if why]
    verdict.seconds = time.monotonic() - started
    return verdict


def tried(shards: Shards, *, trust_remote_code: bool = False) -> Trial:
    """Try the twin of ``shards``, once in a process for every class, structure and degree."""
    tp_size = shards.manifest.tp_size
    path = shards.root / "config.json"
    config = shrunk(parse_config(path.read_bytes(), shown(path), "Split again."), tp_size)
    notes = shards.manifest.notes
    biases = sorted({note.role for note in notes.values()})
    code = sorted(shards.root.glob("*.py")) if trust_remote_code else []
    texts = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in code]
    key = hashlib.sha256(json.dumps([config, tp_size, biases, texts], sort_keys=True).encode()).hexdigest()
    with _lock:
        found = _trials.get(key)
    if found is None:
        found = _try(config, tp_size, trust_remote_code, code)
        with _lock:
            _trials[key] = found
    return found


def _try(config: dict[str, Any], tp_size: int, trust_remote_code: bool, code: Sequence[Path] = ()) -> Trial:
    with tempfile.TemporaryDirectory(prefix="tpshard-twin-") as directory:
        root = Path(directory)
        try:
            write_twin(config, root / "model", trust_remote_code=trust_remote_code, code=code)
            split(root / "model", root / "shards", tp_size)
            shards, source = open_shards(root / "shards"), open_source(root / "model")
        except TpshardError as error:
            why = f"no twin could be made: {error}"
            return Trial({LOCAL: why, ZERO_PAD: why}, False)
        problems, verdicts = {}, {}
        for mode in (ZERO_PAD, LOCAL):
            try:
                verdict = _run(shards, source, mode, trust_remote_code)
            except TpshardError as error:
                problems[mode] = str(error)
                continue
            problems[mode] = _problem(verdict)
            verdicts[mode] = verdict
        return Trial(problems, True, verdicts)


def _run(shards: Shards, source: Source, mode: str, trust_remote_code: bool) -> LevelVerdict:
    from .forward import run_ranks

    return run_ranks(
        shards, source, torch.float64, mode, tokens=TOKENS, min_coverage=0.0, trust_remote_code=trust_remote_code
    )


def _problem(verdict: LevelVerdict) -> str:
    if verdict.verdict == PASSED and verdict.measures:
        return ""
    if verdict.findings:
        return verdict.findings[0].message
    measure = worst(verdict.measures)
    return f"{measure.point} is off by {measure.error:.3g}" if measure else f"its verdict is {verdict.verdict}"


def write_twin(
    config: dict[str, Any],
    directory: Path,
    *,
    seed: int = 0,
    trust_remote_code: bool = False,
    code: Sequence[Path] = (),
) -> None:
    """Save a random model of ``config`` under the names that released files have.

    ``code``: files of the model's own code to put beside the config.

    Every parameter is random, norms and biases too: fresh ones are 1 and 0, and hide what is cut wrongly.

    Raises:
        UnsupportedError: transformers does not build or save it.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in code:
        shutil.copyfile(file, directory / file.name)
    parsed = read_config(directory, trust_remote_code)
    cls = model_class(parsed, directory, trust_remote_code)
    silent = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in cls._from_config(deepcopy(parsed)).parameters())
        if count > MOST_PARAMETERS:
            raise UnsupportedError(
                f"the twin of {cls.__name__} would have {count:,} parameters; its config has sizes that are not known "
                "here"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cls._from_config(parsed, dtype=torch.float32)
            _randomise(model)
        model.save_pretrained(str(directory))
    except TpshardError:
        raise
    except Exception as error:  # whatever a class makes of sizes that it never had
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedError(f"{cls.__name__} cannot be made small: {text:.300}") from None
    finally:
        if silent:
            transformers.utils.logging.enable_progress_bar()


def _randomise(model: Any) -> None:
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if not value.is_floating_point():
                continue
            if value.dim() <= 1 or "norm" in name:
                if isinstance(value, torch.nn.Parameter) or "correction" in name:
                    value.add_(torch.randn_like(value) * 0.3)
            elif isinstance(value, torch.nn.Parameter):
                value.copy_(torch.randn_like(value) * SCALE)
