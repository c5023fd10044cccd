"""Level *backward*: gradients of a loss through the ranks are the slices of the original's gradients.

Ranks are threads that run forward and backward in lockstep with the collectives of a training engine; what
several ranks hold is summed over them where the engine has to. In fp64: on the twin, and then on the model
itself, or on as many of its first layers as fit. The collectives are counted and held against theory.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tpshard.errors import TpshardError
from tpshard.manifest import Manifest
from tpshard.reports import Finding
from tpshard.shards import Shards
from tpshard.source import Source
from tpshard.traffic import traffic_dtype
from tpshard.verdicts import FAILED, PASSED, SOURCE_NAN, UNSUPPORTED, LevelVerdict, Measure, within

from .configs import longest_sequence, require_positions
from .exchange import Tally, ThreadExchange, resolve
from .gradients import Gradients
from .localshapes import localise
from .lockstep import OutOfStepError, ParticipantError, ThreadGroup
from .loss import Loss, gradients_of, inputs_for, moved
from .memory import peak_bytes
from .original import SEVERAL, reordered
from .points import added_once, points_of
from .rankmodel import connect, fetching, materialise
from .skeleton import Skeleton
from .stages import USUAL, Stage, model_stage, twin_stage
from .stores import Part, native_dtype, rank_store, source_store
from .theory import theoretical
from .ways import LOCAL, chosen

LEVEL = "backward"
GATE = 1e-10  # at least
FINE = 1e-12  # in place of it for weights of 32 bits and more, whose last bit is 2**16 times smaller than bfloat16's
MOST_GATE = 5e-7
MOST_GATE_CUT = 5e-6  # where ranks share a float32 sum: norms over cut channels; their gradients are such sums
NOISE = 100.0  # times what re-associated sums move the original's own gradient by
MOVED = 2.0**-24  # of every weight: turns the roundings of a model that computes in float32 inside
TOKENS = 12
SEQUENCES = 2
DTYPE = torch.float64


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
    """Run the level, on the twin and then on as much of the model as fits; the verdict's ``ran_on`` says on what.

    Args:
        source: the model itself; with None the level runs on the twin alone.
        max_memory: bytes that the model's parameters and gradients may take, of all ranks and the original
            together; with None half of what is available, and then at most 200 MB of parameters as stored are
            run, which is a matter of time.
        gates: given a parameter and its default gate, the gate to apply; what it leaves alone is 100 times the
            original's own noise, at least 1e-10 (1e-12 for float32 weights) and at most 5e-7 (5e-6 where a
            norm in float32 spans the ranks).

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: as the level *forward*.
    """
    started = time.monotonic()
    require_positions(shards.root if source is None else source.root, shards.manifest, tokens)
    way = chosen(shards, mode, trust_remote_code=trust_remote_code)
    verdict = LevelVerdict(LEVEL, PASSED, way.mode, notes=list(way.notes))
    tell = progress or (lambda what: None)
    gate_of = gates or (lambda point, gate: gate)
    with tempfile.TemporaryDirectory(prefix="tpshard-backward-") as directory:
        root = Path(directory)
        tell("twin")
        stager = _Stager(verdict, way.mode, max(2, tokens), seed, gate_of, trust_remote_code)
        twin = twin_stage(shards, root, trust_remote_code)
        verdict.ran_on = twin.told
        stager.run(twin)
        if verdict.findings:  # the twin says nothing about this checkpoint
            verdict.notes.append(f"the twin fails: {verdict.findings[0].message}")
            verdict.findings, verdict.verdict = [], UNSUPPORTED
        elif source is None:
            verdict.ran_on = "the twin: no source was given"
        else:
            stage = model_stage(shards, source, way.mode, max_memory, root, trust_remote_code)
            if isinstance(stage, str):
                verdict.ran_on = f"the twin: {stage}"
            else:
                verdict.ran_on = stage.told
                if stage.name != "model":
                    verdict.notes.append(_why_part(max_memory))
                tell(stage.name)
                stager.run(stage)
    if verdict.findings:
        verdict.verdict = FAILED
    verdict.seconds = time.monotonic() - started
    verdict.peak_memory = peak_bytes()
    return verdict


def _why_part(max_memory: int | None) -> str:
    if max_memory is not None:
        return f"more layers do not fit into the {max_memory:,} bytes of --max-memory"
    return (
        f"by default at most {USUAL // 10**6} MB of parameters and half of the available memory are taken; "
        "--max-memory runs more layers"
    )


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
        self._most = MOST_GATE

    def run(self, stage: Stage) -> None:
        manifest = stage.shards.manifest
        shapes: dict[str, tuple[int, ...]] = {tensor.name: tensor.shape for tensor in manifest.tensors}
        reference = Skeleton(stage.roots[0], shapes, DTYPE, trust_remote_code=self.trust)
        ranked = Skeleton(stage.roots[1], shapes, DTYPE, trust_remote_code=self.trust)
        skeletons = [*(copy.deepcopy(ranked) for _ in range(manifest.tp_size - 1)), ranked]
        longest = longest_sequence(stage.source.root, manifest) or self.tokens  # a twin's table is short
        tokens = min(self.tokens, longest)
        inputs = inputs_for(reference, SEQUENCES, tokens, self.seed)
        loss_of = Loss(self.seed)
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
        held = Gradients(reference, shapes, gradients)
        noise = self._noise(manifest, reference, inputs, loss_of, held, (loss, narrowed))
        ranks = self._ranks(stage, skeletons, shapes)
        losses, tally = self._lockstep(manifest, ranks, inputs, loss_of)
        if losses is None:
            return
        self._measure(stage, reference, held, ranks, noise)
        gate = self._gate(stage, "loss", noise)
        for rank, found in enumerate(losses):
            self._add(
                stage, "loss", rank, abs(found - loss) / max(abs(loss), 1e-30), abs(found - loss), gate, "the loss"
            )
        self._count(stage, reference, manifest, tally, SEQUENCES * tokens)

    def _noise(
        self, manifest: Manifest, reference: Skeleton, inputs: Mapping[str, Any], loss_of: Loss, held: Gradients,
        found: tuple[float, bool],
    ) -> dict[str, float]:  # fmt: skip
        """What moves each gradient of the original, and its loss, without a rank: the gates' measure.

        Its sums in another order, 100 times. Where it goes through float32 a rounding there may turn, of which a
        run shows none or a few: one moves no gradient by more than all of them together. Small parameters show
        theirs by chance, so none counts for less than the median.
        """
        loss, narrowed = found
        self._most = MOST_GATE
        points = points_of(reference, manifest)
        undo = reordered(reference, points, manifest.tp_size)
        try:
            again, gradients, _ = gradients_of(reference, inputs, loss_of)
        finally:
            for one in undo:
                one()
        size = max(abs(loss), 1e-30)
        noise = {name: NOISE * value for name, value in held.noise(gradients).items()}
        noise["loss"] = NOISE * abs(again - loss) / size
        del gradients
        if narrowed:
            moved(reference, self.seed, MOVED)
            again, gradients, _ = gradients_of(reference, inputs, loss_of)
            turned = {**held.noise(gradients), "loss": abs(again - loss) / size}
            usual = statistics.median(turned.values())
            cut = any(point.kind == "needs_sum" for point in points.values())
            several = SEVERAL if cut else 1.0
            noise = {name: max(value, several * max(turned.get(name, 0.0), usual)) for name, value in noise.items()}
            self._most = MOST_GATE_CUT if cut else MOST_GATE
        return noise

    def _gate(self, stage: Stage, name: str, noise: Mapping[str, float]) -> float:
        gate = self.gate_of(name, GATE)
        if gate != GATE:
            return gate
        least = FINE if native_dtype(stage.source)[1] >= 4 else GATE
        return max(least, min(self._most, noise.get(name, 0.0)))

    def _ranks(self, stage: Stage, skeletons: list[Skeleton], shapes: Mapping[str, Any]) -> list[_Rank]:
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
        self, stage: Stage, reference: Skeleton, held: Gradients, ranks: list[_Rank], noise: Mapping[str, float]
    ) -> None:
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
                self._add(
                    stage,
                    one.parameter,
                    None,
                    one.error,
                    one.max_abs,
                    self._gate(stage, one.parameter, noise),
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
        self, stage: Stage, name: str, rank: int | None, error: float, gap: float, gate: float, note: str
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

    def _count(self, stage: Stage, reference: Skeleton, manifest: Manifest, tally: Tally, width: int) -> None:
        """Hold the collectives of ``width`` tokens against theory."""
        points = points_of(reference, manifest)
        theory = theoretical(reference, manifest, points)
        dtype, size = traffic_dtype(manifest.tensors)
        self.verdict.collectives = dict(tally.counts)
        self.verdict.collective_bytes_per_token = tally.elements.get("forward", 0) * size / width
        self.verdict.collective_dtype = dtype
        for key, expected in theory.items():
            found = tally.counts.get(key, 0)
            more = key.startswith("backward") and found < expected
            self.verdict.notes.append(
                f"{key} ({stage.name}): {found}, in theory {'at most ' if more else ''}{expected}; "
                f"{tally.elements.get(key.split()[0], 0) * size / width:,.0f} bytes a token {key.split()[0]} in {dtype}"
            )
            if found > expected or (not more and found != expected):
                self.verdict.findings.append(
                    Finding(LEVEL, "", "", f"{found} collectives '{key}' where {expected} are due")
                )
