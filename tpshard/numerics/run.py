"""One lockstep run of the reference and the ranks, and the verdict that comes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tpshard.errors import TpshardError, UnsupportedError
from tpshard.reports import Finding
from tpshard.shards import Shards
from tpshard.source import Source
from tpshard.traffic import traffic_dtype
from tpshard.verdicts import FAILED, PASSED, SOURCE_NAN, LevelVerdict, Measure, within

from .arguments import pictures, vocabulary_of
from .batch import Batch, probes_needed
from .budget import require_memory, tile_bytes
from .configs import config_findings, longest_sequence
from .coverage import Coverage
from .dequantising import holders
from .exact import Exact
from .inputs import expert_counts, inputs_of, text_ids
from .judge import FREE, Judge
from .localrun import LocalJudge, LocalParticipant
from .localshapes import localise
from .lockstep import OutOfStepError, ParticipantError, ThreadGroup
from .memory import Scratch
from .metrics import logit_metrics, perplexity
from .participant import Participant
from .points import added_once, met_as, points_of, replicated
from .promoting import float64_by_default
from .skeleton import Skeleton
from .stores import TILE_BYTES, native_dtype
from .unreached import left_out_by_ranks, plan_findings, share, unreached_note
from .ways import LOCAL

ULP = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}

MOST_PICTURED = 64  # tokens of an image for which the text is made longer without being asked


class Terms(NamedTuple):
    """How a run is made; see :func:`.forward.forward`. ``text`` is the path of a text, or None."""

    dtype: torch.dtype
    mode: str
    device: torch.device
    tokens: int
    max_memory: int | None
    seed: int
    gates: Callable[[str, float], float] | None
    progress: Callable[[str], None] | None
    trust_remote_code: bool
    text: Any = None
    pictures: bool = True  # whether a model that reads images among text is given some


class LockstepRun:
    """Participants, batch and judge of one run, and what came of it."""

    def __init__(self, level: str, shards: Shards, source: Source, terms: Terms) -> None:
        self.level, self.shards, self.source, self.terms = level, shards, source, terms
        held = holders(shards, source)
        self.manifest, self.tp_size = held.manifest, shards.manifest.tp_size
        self.config_keys = held.config_keys
        self.shapes = {tensor.name: tensor.shape for tensor in self.manifest.tensors}
        trusted, dtype = terms.trust_remote_code, terms.dtype
        reference = Skeleton(source.root, self.shapes, dtype, trust_remote_code=trusted)
        ranked = Skeleton(shards.root, self.shapes, dtype, trust_remote_code=trusted)
        self.skeletons = [reference, *(copy.deepcopy(ranked) for _ in range(self.tp_size - 1)), ranked]
        scratch = Scratch()
        self.stores = [held.source_store(scratch), *(held.rank_store(r, scratch) for r in range(self.tp_size))]
        config = reference.model.config.get_text_config()
        text = None if terms.text is None else text_ids(source.root, terms.text)
        if text is not None:
            text = text[: longest_sequence(source.root, self.manifest)]
        tokens = terms.tokens if text is None else len(text)
        self.notes: list[str] = list(held.notes)
        pictured = pictures(reference) if terms.pictures else 0
        if text is None and 0 < pictured <= MOST_PICTURED:
            tokens = max(tokens, pictured + min(tokens, 8))
        elif pictured >= tokens:
            self.notes.append(
                f"no image was run: it takes {pictured} tokens; --tokens {pictured + 8} reaches what reads images"
            )
        probes = probes_needed(tokens, *expert_counts(config))
        self.batch = Batch(tokens, probes, vocabulary_of(reference), terms.seed, ULP[dtype], text)
        if terms.mode == LOCAL:
            for rank, skeleton in enumerate(self.skeletons[1:]):
                localise(skeleton, self.manifest, rank)
        points = points_of(reference, self.manifest)
        judge = LocalJudge if terms.mode == LOCAL else Judge
        self.width = native_dtype(source)[1]
        gates = terms.gates or (lambda point, gate: gate)
        self.judge = judge(points, self.batch, dtype, gates, self.width >= 4, self.stores[0].not_finite)
        self.coverage = Coverage(
            {n: p.numel() for n, p in reference.parameters.items() if n in reference.recipes and p.is_floating_point()}
        )
        if terms.max_memory is not None:
            require_memory(terms.max_memory, reference, points, self.batch, dtype, self.tp_size)
        self.inputs = inputs_of(
            reference, self.batch, config, terms.device, near=text is not None, pictured=terms.pictures
        )
        self.is_pictured = {"input_ids", "pixel_values"} <= self.inputs.keys()
        self.findings: list[Finding] = []

    def verdict(self, min_coverage: float | None) -> LevelVerdict:
        """Run everything and say what came of it; without ``min_coverage`` the ranks must use what the original does.

        Raises:
            UnsupportedError: the model does not run here, or has no point at which its ranks meet.
        """
        unreached: list[str] = []
        fraction: float | None = None
        ran = False
        try:
            participants = self._run()
            ran = bool(self.judge.ledger.measures)
            if participants:
                exact = Exact(self.level, self.manifest, self.skeletons, self.stores, self.coverage, self.judge.ledger)
                unreached = exact.compare(participants)
                fraction = self.coverage.fraction()
                self.findings += exact.findings + left_out_by_ranks(self.level, participants)
                self.notes += exact.notes
                note = unreached_note(self.coverage, self.skeletons[0], frozenset(participants[0].used))
                if note:
                    self.findings += plan_findings(self.level, self.shards.manifest)
                    self.notes.append(note)
        finally:
            for store in self.stores:
                store.close()
        ledger, broken = self.judge.ledger, list(self.stores[0].not_finite)
        verdict = LevelVerdict(self.level, PASSED, self.terms.mode, ledger.measures, self.findings, fraction, unreached)
        verdict.collectives, verdict.notes = ledger.collectives, self.notes
        verdict.collective_bytes_per_token = float(ledger.elements * self.width)
        verdict.collective_dtype = traffic_dtype(self.manifest.tensors)[0]
        if not broken:
            verdict.logits = self._logits()
        self.findings += [self._finding(measure) for measure in first_failures(ledger.measures)]
        found = config_findings(self.level, self.source.root, self.shards.root, self.terms.trust_remote_code)
        self.findings += [finding for finding in found if finding.tensor.split(".")[0] not in self.config_keys]
        if broken:
            return self._of_broken_source(verdict, broken)
        if fraction is not None and min_coverage is not None and fraction < min_coverage:
            self.findings.append(self._too_little(min_coverage, unreached))
        if self.findings:
            verdict.verdict = FAILED
        elif not ran:
            raise UnsupportedError(
                f"{type(self.skeletons[0].model).__name__} has no point at which ranks meet, so nothing was compared"
            )
        return verdict

    def _logits(self) -> dict[str, float]:
        """Figures of the ranks' own stream against the original; adds its measure."""
        if self.judge.outputs is None:
            return {}
        expected, found = self.judge.outputs
        figures = logit_metrics(found, expected)
        gate = FREE[self.terms.dtype]
        error = figures["rel_l2"]
        status = "pass" if within(error, gate) else "fail"
        self.judge.ledger.measures.append(
            Measure(
                "logits",
                "logits",
                "logits",
                None,
                error,
                error,
                figures["max_abs"],
                gate,
                status,
                "the ranks' own stream",
            )
        )
        if self.terms.text is not None and self.judge.is_causal:
            ids = self.batch.ids()[:1]
            figures["perplexity"] = perplexity(found, ids)
            figures["perplexity_original"] = perplexity(expected, ids)
        return figures

    def _of_broken_source(self, verdict: LevelVerdict, broken: Sequence[str]) -> LevelVerdict:
        """Failed where something that is finite in the source differs; else neither passed nor failed."""
        verdict.verdict = FAILED if self.findings else SOURCE_NAN
        more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        points = list(self.judge.left_out)
        where = f" ({len(points)} points, from {points[0]} on)" if points else ""
        self.notes.append(
            f"the source itself holds NaN or Inf in {', '.join(broken[:5])}{more}: what comes of them{where} cannot be "
            "compared and was left out; the rest was compared, with 0 in their place. Compare those by bytes"
        )
        return verdict

    def _too_little(self, wanted: float, unreached: Sequence[str]) -> Finding:
        names = ", ".join(unreached[:5]) + (f" and {len(unreached) - 5} more" if len(unreached) > 5 else "")
        return Finding(
            self.level, "", unreached[0] if unreached else "",
            f"the run did not reach {share(self.coverage)}, more than the coverage of {wanted:.6g} that was asked for "
            f"allows; compared by bytes and their cuts by plan: {names}",
        )  # fmt: skip

    def _finding(self, measure: Measure) -> Finding:
        who = "" if measure.rank is None else f" on rank {measure.rank}"
        note = f" ({measure.note})" if measure.note else ""
        message = (
            f"{measure.point}{who}: {measure.kind} differs from the original by {measure.error:.3g} where "
            f"{measure.gate:.3g} is allowed{note}"
        )
        return Finding(self.level, "", measure.point, message)

    def _run(self) -> list[Participant]:
        """Run to the end; an empty list where a rank could not follow the reference, which is a finding then."""
        terms, group = self.terms, ThreadGroup(self.tp_size + 1, self._resolve)
        tile = TILE_BYTES if terms.max_memory is None else tile_bytes(terms.max_memory)
        once = added_once(self.manifest)
        notes = {name: met_as(self.manifest, name) for name in self.manifest.notes}
        participants = [
            (LocalParticipant if number and terms.mode == LOCAL else Participant)(
                number, skeleton, store, self.judge.points,
                compute=terms.dtype, device=terms.device, batch=self.batch, group=group, once=once,
                exact=replicated(notes, once), tile_bytes=tile,
                coverage=self.coverage if number == 0 else None, shapes=self.shapes,
            )
            for number, (skeleton, store) in enumerate(zip(self.skeletons, self.stores, strict=True))
        ]  # fmt: skip
        try:
            with float64_by_default(terms.dtype):
                group.run([lambda p=p: p.run(self.inputs) for p in participants])  # type: ignore[misc]
        except OutOfStepError as error:
            message = (
                f"ranks and original do not run the same modules: {error}; the config.json of the shards is not the "
                "source's"
            )
            self.findings.append(Finding(self.level, "config.json", "", message))
            return []
        except ParticipantError as error:
            self.findings.append(self._failure(error))
            return []
        return participants

    def _failure(self, error: ParticipantError) -> Finding:
        """What a participant's failure means: of the machine, of the model, or of the shards."""
        if isinstance(error.cause, TpshardError):
            raise error.cause from None
        place = error.point or "the start"
        what = " ".join(f"{type(error.cause).__name__}: {error.cause}".split())[:300]
        if isinstance(error.cause, MemoryError) or "allocate memory" in what or "out of memory" in what:
            raise UnsupportedError(
                f"memory ran out after {place}: {what}; give more, fewer tokens, or a smaller --compute"
            ) from error.cause
        if error.participant == 0:
            name = type(self.skeletons[0].model).__name__
            hint = "; its code may run in --compute fp32" if self.terms.dtype == torch.float64 else ""
            raise UnsupportedError(
                f"{name} does not run on its own weights, after {place}: {what}{hint}"
            ) from error.cause
        message = f"rank {error.participant - 1} fails after {place}, where the original runs on: {what}"
        return Finding(self.level, "", error.point, message)

    def _resolve(self, point: str, payloads: list[Any]) -> list[Any]:
        if self.terms.progress is not None:
            self.terms.progress(point)
        with torch.no_grad():
            return self.judge.resolve(point, payloads)


def first_failures(measures: Sequence[Measure]) -> list[Measure]:
    """Failed measures in the order in which they were met, one a point and rank."""
    seen: dict[tuple[str, int | None], Measure] = {}
    for measure in measures:
        if measure.status == "fail":
            seen.setdefault((measure.point, measure.rank), measure)
    return list(seen.values())
