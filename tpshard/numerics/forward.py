"""Level *forward*: the ranks' shards run in lockstep with the original, block by block.

A reference, built from the source's config with the source's tensors, and one participant a rank, built
from the shards' config with only that rank's tensors, run the model's own unmodified code on the same
inputs. Wherever a tensor-parallel group would exchange tensors they meet and are compared.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tpshard.errors import DamagedError, TpshardError, UnsupportedError, UsageError
from tpshard.reports import Finding
from tpshard.shards import Shards
from tpshard.source import Source
from tpshard.verdicts import FAILED, PASSED, SOURCE_NAN, LevelVerdict, Measure, within

from .batch import Batch, probes_needed
from .coverage import Coverage
from .judge import EXACT, FREE, Judge
from .localrun import LocalJudge, LocalParticipant
from .localshapes import localise
from .lockstep import OutOfStepError, ParticipantError, ThreadGroup
from .memory import Scratch, peak_bytes, share_one_heap
from .metrics import logit_metrics
from .participant import Participant
from .points import PREDICTION, ROW, added_once, base_role, points_of, replicated
from .rows import RowDifference, compare_rows
from .skeleton import Skeleton
from .stores import TILE_BYTES, Store, rank_store, source_store
from .ways import LOCAL, chosen

LEVEL = "forward"
COMPUTE = {"fp64": torch.float64, "fp32": torch.float32}
NATIVE = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
ULP = {torch.float64: 2.0**-24, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
DEFAULT_TOKENS = 16
DEFAULT_MEMORY = 64 << 20


def forward(
    shards: Shards,
    source: Source,
    *,
    compute: str = "fp64",
    mode: str = "auto",
    tokens: int = DEFAULT_TOKENS,
    max_memory: int | None = None,
    device: str = "cpu",
    min_coverage: float = 1.0,
    seed: int = 0,
    gates: Callable[[str, float], float] | None = None,
    progress: Callable[[str], None] | None = None,
    trust_remote_code: bool = False,
) -> LevelVerdict:
    """Run the level.

    Args:
        compute: ``fp64``, ``fp32``, or ``native`` (the dtype of most of the weights).
        mode: how a rank is run: ``zero-pad``, ``local`` (on the shapes that it stores), or ``auto``: local where
            the twin of this class passes so (see :mod:`.twin`).
        tokens: length of the sequences, at least 2.
        max_memory: bytes of weights to hold at a time; bounds the tiles in which matrices are read.
        min_coverage: the part of the parameters that must be reached, 0 to 1.
        gates: given a point and its default gate, the gate to apply.
        progress: called with the name of every point as it is passed.

    Raises:
        UsageError: an argument that makes no sense.
        UnsupportedError: the model's class is unknown or fails on its own weights, or there is no such device.
        DamagedError: the shards are not of this source, or config and weights are not of one model.
        StorageError: reading failed.
    """
    started = time.monotonic()
    share_one_heap()
    dtype = _dtype(compute, source)
    place = _device(device)
    if tokens < 2:
        raise UsageError(f"{tokens} tokens make no sequence; give at least 2")
    _require_same_tensors(shards, source)
    way = chosen(shards, mode, trust_remote_code=trust_remote_code)
    verdict = run_ranks(
        shards, source, dtype, way.mode, device=place, tokens=tokens, max_memory=max_memory or DEFAULT_MEMORY,
        min_coverage=min_coverage, seed=seed, gates=gates, progress=progress, trust_remote_code=trust_remote_code,
    )
    verdict.notes += way.notes
    verdict.seconds = time.monotonic() - started
    verdict.peak_memory = peak_bytes()
    return verdict


def run_ranks(
    shards: Shards,
    source: Source,
    dtype: torch.dtype,
    mode: str,
    *,
    device: torch.device = torch.device("cpu"),
    tokens: int = DEFAULT_TOKENS,
    max_memory: int = DEFAULT_MEMORY,
    min_coverage: float = 1.0,
    seed: int = 0,
    gates: Callable[[str, float], float] | None = None,
    progress: Callable[[str], None] | None = None,
    trust_remote_code: bool = False,
) -> LevelVerdict:
    """Run ranks of the same tensors as the source in one way, without asking the twin; see :func:`forward`."""
    run = _Run(shards, source, dtype, device, tokens, max_memory, seed, gates, progress, trust_remote_code, mode)
    return run.verdict(min_coverage)


class _Run:
    """One run of the level: participants, batch, judge, and what came of it."""

    def __init__(
        self,
        shards: Shards,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int,
        max_memory: int,
        seed: int,
        gates: Callable[[str, float], float] | None,
        progress: Callable[[str], None] | None,
        trust_remote_code: bool,
        mode: str,
    ) -> None:
        self.mode = mode
        self.shards, self.source, self.dtype, self.device = shards, source, dtype, device
        self.manifest, self.tp_size = shards.manifest, shards.manifest.tp_size
        self.progress = progress
        shapes = {tensor.name: tensor.shape for tensor in self.manifest.tensors}
        reference = Skeleton(source.root, shapes, dtype, trust_remote_code=trust_remote_code)
        ranked = Skeleton(shards.root, shapes, dtype, trust_remote_code=trust_remote_code)
        self.skeletons = [reference, *(copy.deepcopy(ranked) for _ in range(self.tp_size - 1)), ranked]
        scratch = Scratch()
        self.stores = [source_store(source, scratch), *(rank_store(shards, r, scratch) for r in range(self.tp_size))]
        self.once = added_once(self.manifest)
        self.exact = replicated(self.manifest.notes, self.once)
        config = reference.model.config.get_text_config()
        self.batch = Batch(tokens, _probes(config, tokens), _vocabulary(reference, config), seed, ULP[dtype])
        if mode == LOCAL:
            for rank, skeleton in enumerate(self.skeletons[1:]):
                localise(skeleton, self.manifest, rank)
        self.judge = (LocalJudge if mode == LOCAL else Judge)(
            points_of(reference, self.manifest), self.batch, dtype, gates or (lambda point, gate: gate)
        )
        self.coverage = Coverage(_sizes(reference))
        self.inputs = _inputs(reference, self.batch, config, device)
        self.max_memory = max_memory
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def verdict(self, min_coverage: float) -> LevelVerdict:
        """Run everything and say what came of it."""
        try:
            participants = self._run()
            if participants:
                self._tables()
                self._digests(participants)
                self._buffers()
            unreached = self._unreached() if participants else []
        finally:
            for store in self.stores:
                store.close()
        measures = self.judge.ledger.measures
        broken = list(self.stores[0].not_finite)
        logits = {}
        if self.judge.outputs is not None:
            expected, found = self.judge.outputs
            logits = logit_metrics(found, expected)
            free = Measure("logits", "logits", "logits", None, logits["rel_l2"], logits["rel_l2"], logits["max_abs"], 0.0, "pass", "the ranks' own stream")
            free.gate = FREE[self.dtype]
            free.status = "pass" if within(free.error, free.gate) else "fail"
            measures.append(free)
        fraction = self.coverage.fraction() if participants else None
        verdict = LevelVerdict(LEVEL, PASSED, self.mode, measures, self.findings, fraction, unreached)
        verdict.collectives = self.judge.ledger.collectives
        verdict.collective_bytes_per_token = float(self.judge.ledger.elements * _native_bytes(self.source))
        verdict.logits, verdict.notes = logits, self.notes
        if broken:
            verdict.verdict = SOURCE_NAN
            self.notes.append(
                f"the source itself holds NaN or Inf in {', '.join(broken[:5])}: what the ranks compute from them "
                "cannot be compared; compare by bytes (--level bytes)"
            )
            return verdict
        self.findings += [_finding(measure) for measure in _worst_first(measures)]
        if fraction is not None and fraction < min_coverage:
            shown = ", ".join(unreached[:5])
            self.findings.append(
                Finding(LEVEL, "", unreached[0] if unreached else "", f"only {fraction:.4%} of the parameters were reached by the run, less than the {min_coverage:.4%} asked for; compared by bytes only: {shown}")
            )
        if self.findings:
            verdict.verdict = FAILED
        return verdict

    # -- the run --------------------------------------------------------------------------------

    def _run(self) -> list[Participant]:
        group = ThreadGroup(self.tp_size + 1, self._resolve)
        participants = [
            (LocalParticipant if number and self.mode == LOCAL else Participant)(
                number, skeleton, store, self.judge.points,
                compute=self.dtype, device=self.device, batch=self.batch, group=group, once=self.once,
                exact=self.exact, tile_bytes=max(1 << 16, min(TILE_BYTES, self.max_memory // 16)),
                coverage=self.coverage if number == 0 else None,
                shapes={tensor.name: tensor.shape for tensor in self.manifest.tensors},
            )
            for number, (skeleton, store) in enumerate(zip(self.skeletons, self.stores, strict=True))
        ]
        try:
            group.run([lambda p=p: p.run(self.inputs) for p in participants])  # type: ignore[misc]
        except OutOfStepError as error:
            self.findings.append(
                Finding(LEVEL, "config.json", "", f"ranks and original run different modules ({error}); the config.json of the shards is not the source's")
            )
            return []
        except ParticipantError as error:
            if isinstance(error.cause, TpshardError):
                raise error.cause from None
            what = f"{type(error.cause).__name__}: {error.cause}"[:300]
            if isinstance(error.cause, MemoryError) or "alloc" in str(error.cause):
                raise UnsupportedError(f"memory ran out after {error.point}: {what}; use a smaller dtype or more memory") from error.cause
            if error.participant == 0:
                raise UnsupportedError(
                    f"{type(self.skeletons[0].model).__name__} does not run on its own weights, after "
                    f"{error.point or 'the start'}: {what}"
                ) from error.cause
            self.findings.append(
                Finding(LEVEL, "", error.point, f"rank {error.participant - 1} fails after {error.point or 'the start'} where the original runs: {what}")
            )
            return []
        return participants

    def _resolve(self, point: str, payloads: list[Any]) -> list[Any]:
        if self.progress is not None:
            self.progress(point)
        with torch.no_grad():
            return self.judge.resolve(point, payloads)

    # -- what needs no run ----------------------------------------------------------------------

    def _tables(self) -> None:
        """All rows of the embedding and the head, on every rank."""
        names = [n for n, note in self.manifest.notes.items() if base_role(note) in ("embed", "head")]
        for name in names:
            self._by_bytes(name, "rows")
            skeleton = self.skeletons[0]
            for parameter, recipe in skeleton.recipes.items():
                if recipe.plain and recipe.tensors[0][0] == name and parameter in self.coverage.sizes:
                    self.coverage.full(parameter)

    def _digests(self, participants: list[Participant]) -> None:
        """Tensors that are whole everywhere must be the source's to the bit."""
        for name, digest in participants[0].digests.items():
            for participant in participants[1:]:
                found = participant.digests.get(name)
                if found is not None and found != digest:
                    self._by_bytes(name, "replicated", [participant.number - 1])
            if base_role(self.manifest.notes[name]) == "position":
                for parameter, recipe in self.skeletons[0].recipes.items():
                    if recipe.plain and recipe.tensors[0][0] == name and parameter in self.coverage.sizes:
                        self.coverage.full(parameter)

    def _buffers(self) -> None:
        """Buffers that come from the config: another rope scaling or window shows here even where no input sees it."""
        expected = dict(self.skeletons[0].computed_buffers())
        for name, buffer in self.skeletons[1].computed_buffers():
            other = expected.get(name)
            if other is None or other.shape != buffer.shape or not torch.equal(other, buffer):
                self.findings.append(
                    Finding(LEVEL, "config.json", name, f"{name} comes out differently from the config.json of the shards than from the source's")
                )

    def _by_bytes(self, name: str, kind: str, ranks: list[int] | None = None) -> None:
        source = self.stores[0]
        point = name.rpartition(".")[0]
        for rank in ranks if ranks is not None else range(self.tp_size):
            store = self.stores[rank + 1]
            part = store.parts.get(name)
            if part is None:
                continue
            found = compare_rows(source, source.parts[name], store, part) or RowDifference(0.0, 0.0, -2, 0)
            note = ""
            if found.rows:
                where = "padding" if found.row == -1 else f"row {found.row}"
                note = f"{found.rows} rows of {name} differ, most of all {where}"
            self.judge.ledger.measures.append(
                Measure(point, point.rpartition(".")[0] or point, kind, rank, found.error, None, found.max_abs, EXACT, "fail" if found.rows else "pass", note)
            )

    def _unreached(self) -> list[str]:
        """Tensors that the run did not exercise in full; they are compared by bytes instead."""
        names: dict[str, None] = {}
        for parameter in self.coverage.unreached():
            recipe = self.skeletons[0].recipes[parameter]
            names.update(dict.fromkeys(name for name, _ in recipe.tensors))
        names.update(dict.fromkeys(self.skeletons[0].extra))
        for name in names:
            self._by_bytes(name, "rows")
        if self.skeletons[0].extra:
            self.notes.append(
                f"{len(self.skeletons[0].extra)} tensors belong to no parameter of "
                f"{type(self.skeletons[0].model).__name__} and were compared by bytes"
            )
        return list(names)


def _finding(measure: Measure) -> Finding:
    who = "" if measure.rank is None else f" on rank {measure.rank}"
    note = f" ({measure.note})" if measure.note else ""
    return Finding(
        LEVEL, "", measure.point,
        f"{measure.point}{who}: {measure.kind} differs from the original by {measure.error:.3g} where {measure.gate:.3g} is allowed{note}",
    )


def _worst_first(measures: list[Measure]) -> list[Measure]:
    """Failed measures in the order in which they were met, one a point, kind and rank."""
    seen: dict[tuple[str, int | None], Measure] = {}
    for measure in measures:
        if measure.status == "fail":
            seen.setdefault((measure.point, measure.rank), measure)
    return list(seen.values())


def _dtype(compute: str, source: Source) -> torch.dtype:
    if compute == "native":
        sizes: dict[str, int] = {}
        for _, info in source.tensors():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        most = max(sizes, key=lambda name: sizes[name])
        if most not in NATIVE:
            raise UnsupportedError(f"most of the weights are {most}, which is no dtype to compute in; use fp64 or fp32")
        return NATIVE[most]
    if compute not in COMPUTE:
        raise UsageError(f"'{compute}' is not a dtype to compute in; choose fp64, fp32 or native")
    return COMPUTE[compute]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"'{name}' is not a device; choose cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("there is no CUDA device, or this torch was built without CUDA; use --device cpu")
    return device


def _require_same_tensors(shards: Shards, source: Source) -> None:
    mine = {tensor.name: (tensor.dtype, tensor.shape) for tensor in shards.manifest.tensors}
    theirs = {info.name: (info.dtype, info.shape) for _, info in source.tensors()}
    odd = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if odd:
        here, there = mine.get(odd[0], "absent"), theirs.get(odd[0], "absent")
        raise DamagedError(
            f"the shards are not of this source: {odd[0]} is {here} in the shards and {there} in the source "
            f"({len(odd)} tensors differ); name the checkpoint that they were cut from"
        )


def _probes(config: Any, tokens: int) -> int:
    experts = max(
        (int(getattr(config, key, 0) or 0) for key in ("num_experts", "num_local_experts", "n_routed_experts")), default=0
    )
    return probes_needed(tokens, experts, int(getattr(config, "num_experts_per_tok", 1) or 1))


def _vocabulary(skeleton: Skeleton, config: Any) -> int:
    table = skeleton.model.get_input_embeddings()
    return int(table.weight.shape[0]) if table is not None else int(config.vocab_size)


def _sizes(skeleton: Skeleton) -> dict[str, int]:
    return {n: p.numel() for n, p in skeleton.parameters.items() if n in skeleton.recipes and p.is_floating_point()}


def _native_bytes(source: Source) -> int:
    counts: dict[str, int] = {}
    for _, info in source.tensors():
        counts[info.dtype] = counts.get(info.dtype, 0) + info.nbytes
    most = max(counts, key=lambda name: counts[name])
    return {"F64": 8, "F32": 4}.get(most, 2)


def _inputs(skeleton: Skeleton, batch: Batch, config: Any, device: torch.device) -> Mapping[str, torch.Tensor]:
    """Token ids, a mask of ones, and positions that reach far, where the model takes them.

    The mask is explicit because gapped positions alone make transformers take the row for several packed sequences.
    """
    ids = batch.ids()
    takes = inspect.signature(skeleton.model.forward).parameters
    inputs = {"input_ids": ids}
    if "attention_mask" in takes:
        inputs["attention_mask"] = torch.ones_like(ids)
    longest = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 0) or 0)
    if "position_ids" in takes and longest >= batch.tokens:
        near = batch.tokens // 2
        far = torch.linspace(near, longest - 1, batch.tokens - near, dtype=torch.float64).round().long()
        inputs["position_ids"] = torch.cat([torch.arange(near), far]).expand(batch.rows, -1).contiguous()
    if "use_cache" in takes:
        inputs["use_cache"] = False  # type: ignore[assignment]
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
