"""Level *backward*: gradients of a loss through the ranks are the slices of the original's gradients.

Ranks are threads that run forward and backward in lockstep with the collectives of a training engine; what
several ranks hold is summed over them where the engine has to. In fp64: on the twin, and on the model itself
where memory allows, or on its first layers. The collectives are counted and held against theory.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from tpshard.convert import split
from tpshard.errors import TpshardError, UnsupportedError
from tpshard.listing import shown
from tpshard.manifest import Manifest
from tpshard.reports import Finding
from tpshard.shards import Shards, open_shards
from tpshard.source import Source, open_source
from tpshard.strictjson import parse_object
from tpshard.verdicts import FAILED, PASSED, SOURCE_NAN, UNSUPPORTED, LevelVerdict, Measure, within

from .exchange import Tally, ThreadExchange, resolve
from .gradients import Gradients
from .localshapes import localise
from .lockstep import OutOfStepError, ParticipantError, ThreadGroup
from .loss import Loss, gradients_of, inputs_for, noise_of
from .memory import peak_bytes
from .points import added_once, points_of
from .rankmodel import connect, fetching, materialise
from .skeleton import Skeleton
from .stores import Part, native_dtype, rank_store, source_store
from .theory import theoretical
from .twin import write_twin
from .twinconfig import first_layers, shrunk
from .ways import LOCAL, chosen

LEVEL = "backward"
GATE = 1e-10
MOST_GATE = 1e-5  # of a model that computes in float32 inside
MOVED = 2.0**-24  # relative movement of every weight, by which such a model's own noise is measured
TOKENS = 12
SEQUENCES = 2
BYTES = 8 * 3  # of an element of a parameter: value, gradient, and what autograd keeps for a while
DTYPE = torch.float64


@dataclass
class _Stage:
    """Something to run the level on."""

    name: str
    shards: Shards
    source: Source
    root: Path | None = None  # holds another config.json than the source and the shards do


def backward(
    shards: Shards,
    source: Source | None = None,
    *,
    mode: str = "auto",
    tokens: int = TOKENS,
    max_memory: int | None = None,
    seed: int = 0,
    gates: Callable[[str, float], float] | None = None,
    progress: Callable[[str], None] | None = None,
    trust_remote_code: bool = False,
) -> LevelVerdict:
    """Run the level, on the twin and then on as much of the model as fits.

    Args:
        source: the model itself; with None the level runs on the twin alone.
        max_memory: bytes that the model's parameters and gradients may take, of all ranks and the original
            together; with None only the twin is run.
        gates: given a parameter and its default gate, the gate to apply.

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: as the level *forward*.
    """
    started = time.monotonic()
    way = chosen(shards, mode, trust_remote_code=trust_remote_code)
    verdict = LevelVerdict(LEVEL, PASSED, way.mode, notes=list(way.notes))
    tell = progress or (lambda what: None)
    gate_of = gates or (lambda point, gate: gate)
    with tempfile.TemporaryDirectory(prefix="tpshard-backward-") as directory:
        root = Path(directory)
        tell("twin")
        twin = _twin(shards, root, trust_remote_code)
        _Stager(verdict, way.mode, max(2, tokens), seed, gate_of, trust_remote_code).run(twin)
        if verdict.findings:  # the twin says nothing about this checkpoint
            verdict.notes.append(f"the twin fails: {verdict.findings[0].message}")
            verdict.findings, verdict.verdict = [], UNSUPPORTED
        elif source is not None and max_memory is not None:
            stage = _fitting(shards, source, way.mode, max_memory, root, verdict.notes)
            if stage is not None:
                tell(stage.name)
                _Stager(verdict, way.mode, max(2, tokens), seed, gate_of, trust_remote_code).run(stage)
        else:
            verdict.notes.append("gradients were compared on the twin; give --max-memory to run the model itself")
    if verdict.findings:
        verdict.verdict = FAILED
    verdict.seconds = time.monotonic() - started
    verdict.peak_memory = peak_bytes()
    return verdict


def _twin(shards: Shards, root: Path, trust_remote_code: bool) -> _Stage:
    path = shards.root / "config.json"
    config = shrunk(parse_object(path.read_bytes(), shown(path), "Split again."), shards.manifest.tp_size)
    try:
        write_twin(config, root / "model", trust_remote_code=trust_remote_code)
        split(root / "model", root / "shards", shards.manifest.tp_size)
    except TpshardError as error:
        raise UnsupportedError(f"no twin of this model could be made: {error}") from None
    return _Stage("twin", open_shards(root / "shards"), open_source(root / "model"))


def _fitting(shards: Shards, source: Source, mode: str, max_memory: int, root: Path, notes: list[str]) -> _Stage | None:
    """The model, or as many of its first layers as fit, or None."""
    path = source.root / "config.json"
    config = parse_object(path.read_bytes(), shown(path), "Restore it.")
    layers = next(
        (config[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(config.get(k), int)), 0
    )
    manifest = shards.manifest
    for count in (*range(layers, 0, -1), 0) if layers else (0,):
        needed = _bytes_needed(manifest, mode, None if count in (0, layers) else count)
        if count and needed <= max_memory:
            if count == layers:
                return _Stage("model", shards, source)
            notes.append(f"gradients of the model itself were compared on its first {count} of {layers} layers")
            folder = root / "first"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(first_layers(config, count)), encoding="utf-8")
            return _Stage(f"first {count} layers", shards, source, folder)
    notes.append(
        f"gradients were compared on the twin alone: one layer of the model would take {needed:,} bytes, "
        f"more than the {max_memory:,} that are allowed"
    )
    return None


def _bytes_needed(manifest: Manifest, mode: str, layers: int | None) -> int:
    elements = 0
    for stored in manifest.layout.stored:
        numbers = [int(part) for part in stored.name.split(".") if part.isdigit()]
        if layers is not None and numbers and numbers[0] >= layers:
            continue
        whole = prod(manifest.layout.tensors[stored.name].shape)
        elements += whole
        for shape in stored.shapes:
            elements += whole if mode != LOCAL else prod(shape or (0,))
    return elements * BYTES


class _Rank:
    """A rank's model and what it stores."""

    def __init__(self, skeleton: Skeleton, parts: Mapping[str, Part]) -> None:
        self.skeleton, self.parts = skeleton, parts
        self._parameters = dict(skeleton.model.named_parameters(remove_duplicate=False))

    def gradient(self, name: str) -> torch.Tensor | None:
        """The gradient of a parameter, None where none came."""
        gradient: torch.Tensor | None = self._parameters[name].grad
        return gradient


class _Stager:
    """Runs stages and adds what they gave to one verdict."""

    def __init__(
        self, verdict: LevelVerdict, mode: str, tokens: int, seed: int, gate_of: Callable[[str, float], float],
        trust_remote_code: bool,
    ) -> None:  # fmt: skip
        self.verdict, self.mode, self.tokens, self.seed = verdict, mode, tokens, seed
        self.gate_of, self.trust = gate_of, trust_remote_code

    def run(self, stage: _Stage) -> None:
        manifest = stage.shards.manifest
        shapes: dict[str, tuple[int, ...]] = {tensor.name: tensor.shape for tensor in manifest.tensors}
        reference = Skeleton(stage.root or stage.source.root, shapes, DTYPE, trust_remote_code=self.trust)
        ranked = Skeleton(stage.root or stage.shards.root, shapes, DTYPE, trust_remote_code=self.trust)
        skeletons = [*(copy.deepcopy(ranked) for _ in range(manifest.tp_size - 1)), ranked]
        inputs = inputs_for(reference, SEQUENCES, self.tokens, self.seed)
        loss_of = Loss(inputs["input_ids"], self.seed)
        store = source_store(stage.source)
        try:
            materialise(
                reference,
                lambda name: store.full(store.parts[name], DTYPE).clone(),
                torch.device("cpu"),
                trainable=True,
            )
            if store.not_finite:
                self.verdict.verdict = SOURCE_NAN
                self.verdict.notes.append(
                    f"the source itself holds NaN or Inf in {', '.join(list(store.not_finite)[:5])}"
                )
                return
        finally:
            store.close()
        loss, gradients, narrowed = gradients_of(reference, inputs, loss_of)
        noise = noise_of(reference, inputs, loss_of, gradients, self.seed, MOVED) if narrowed else {}
        ranks = self._ranks(stage, skeletons, shapes)
        losses, tally = self._lockstep(manifest, ranks, inputs, loss_of)
        if losses is None:
            return
        self._measure(stage, reference, shapes, gradients, ranks, noise)
        gate = self.gate_of("loss", max(GATE, min(MOST_GATE, max(noise.values(), default=0.0))))
        for rank, found in enumerate(losses):
            self._add(
                stage, "loss", rank, abs(found - loss) / max(abs(loss), 1e-30), abs(found - loss), gate, "the loss"
            )
        self._count(stage, reference, manifest, tally)

    def _ranks(self, stage: _Stage, skeletons: list[Skeleton], shapes: Mapping[str, Any]) -> list[_Rank]:
        manifest = stage.shards.manifest
        once = added_once(manifest)
        out = []
        for rank, skeleton in enumerate(skeletons):
            store = rank_store(stage.shards, rank)
            try:
                if self.mode == LOCAL:
                    localise(skeleton, manifest, rank)
                fetch = fetching(store, self.mode, DTYPE, once, rank, shapes)
                materialise(skeleton, fetch, torch.device("cpu"), trainable=True)
            finally:
                store.close()
            out.append(_Rank(skeleton, dict(store.parts)))
        return out

    def _lockstep(
        self, manifest: Manifest, ranks: list[_Rank], inputs: Mapping[str, Any], loss_of: Loss
    ) -> tuple[list[float] | None, Tally]:
        group = ThreadGroup(len(ranks), lambda point, payloads: list(resolve(point, payloads)))
        losses = [0.0] * len(ranks)
        exchanges = [ThreadExchange(group, number) for number in range(len(ranks))]

        def body(number: int) -> None:
            rank = ranks[number]
            connect(
                rank.skeleton, manifest, points_of(rank.skeleton, manifest), rank.parts, exchanges[number], self.mode
            )
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                loss = loss_of(rank.skeleton.model(**inputs))
                loss.backward()
            losses[number] = float(loss.detach())

        try:
            group.run([lambda n=n: body(n) for n in range(len(ranks))])  # type: ignore[misc]
        except (ParticipantError, OutOfStepError) as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, TpshardError):
                raise cause from None
            text = " ".join(str(error).split())
            self.verdict.findings.append(
                Finding(
                    LEVEL, "", getattr(error, "point", ""), f"ranks do not run where the original does: {text:.300}"
                )
            )
            return None, exchanges[0].tally
        return losses, exchanges[0].tally

    def _measure(
        self, stage: _Stage, reference: Skeleton, shapes: Mapping[str, Any],
        gradients: Mapping[str, torch.Tensor | None], ranks: list[_Rank], noise: Mapping[str, float],
    ) -> None:  # fmt: skip
        held = Gradients(reference, shapes, gradients)
        kinds: dict[str, list[str]] = {}
        alone = 0.0
        seen: set[int] = set()
        for recipe in reference.recipes.values():
            if id(recipe) in seen:
                continue
            seen.add(id(recipe))
            found = held.compare(recipe, [rank.parts for rank in ranks], self.mode, [rank.gradient for rank in ranks])
            for one in found:
                kinds.setdefault(one.kind, []).append(one.parameter)
                alone = max(alone, one.alone or 0.0)
                default = max(GATE, min(MOST_GATE, noise.get(one.parameter, 0.0)))
                self._add(
                    stage,
                    one.parameter,
                    None,
                    one.error,
                    one.max_abs,
                    self.gate_of(one.parameter, default),
                    f"{one.kind}, on the {stage.name}",
                )
        partial = sorted({name.split(".")[-2] for name in kinds.get("partial", []) if "." in name})
        if partial:
            self.verdict.notes.append(f"gradients to be summed over all ranks ({stage.name}): {', '.join(partial)}")
        if alone > GATE:
            self.verdict.notes.append(
                f"copies on several ranks are to be summed ({stage.name}): one copy alone is off by {alone:.3g}"
            )

    def _add(
        self, stage: _Stage, name: str, rank: int | None, error: float, gap: float, gate: float, note: str
    ) -> None:
        point = name.rpartition(".")[0] or name
        status = "pass" if within(error, gate) else "fail"
        self.verdict.measures.append(
            Measure(name, point.rpartition(".")[0] or point, "gradient", rank, error, None, gap, gate, status, note)
        )
        if status == "fail":
            who = "" if rank is None else f" of rank {rank}"
            self.verdict.findings.append(
                Finding(
                    LEVEL,
                    "",
                    name,
                    f"{name}: gradient{who} differs from the original's by {error:.3g} where {gate:.3g} is allowed "
                    f"({note})",
                )
            )

    def _count(self, stage: _Stage, reference: Skeleton, manifest: Manifest, tally: Tally) -> None:
        """Hold the collectives against theory."""
        points = points_of(reference, manifest)
        theory = theoretical(reference, manifest, points)
        width = SEQUENCES * self.tokens
        size = native_dtype(stage.source)[1]
        self.verdict.collectives = dict(tally.counts)
        self.verdict.collective_bytes_per_token = sum(tally.elements.values()) * size / width
        for key, expected in theory.items():
            found = tally.counts.get(key, 0)
            more = key.startswith("backward") and found < expected
            self.verdict.notes.append(
                f"{key} ({stage.name}): {found}, in theory {'at most ' if more else ''}{expected}; "
                f"{tally.elements.get(key.split()[0], 0) * size / width:,.0f} bytes a token {key.split()[0]}"
            )
            if found > expected or (not more and found != expected):
                self.verdict.findings.append(
                    Finding(LEVEL, "", "", f"{found} collectives '{key}' where {expected} are due")
                )
