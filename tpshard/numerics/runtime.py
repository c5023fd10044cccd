"""Level *runtime*: one process a rank, each with its own file alone, in the dtype of the weights.

Ranks run as an engine's would: local shapes where the class can, collectives over NCCL or gloo, a prefill and
then greedy decoding with the model's own cache. What they give is held against the original's run, whose own
noise sets the gates, and every sum must be the same on all ranks to the bit.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tpshard.errors import DamagedError, UnsupportedError, UsageError
from tpshard.launch import Launch, launched
from tpshard.quantisation.methods import quantisation_of
from tpshard.reports import Finding
from tpshard.shards import Shards, read_manifest
from tpshard.source import Source, open_source
from tpshard.traffic import traffic_dtype
from tpshard.verdicts import FAILED, PASSED, SOURCE_NAN, LevelVerdict, Measure, within

from .configs import longest_sequence, require_positions
from .forward import device_of, require_same_tensors
from .inputs import expert_counts, on_device
from .localshapes import localise
from .loss import inputs_for
from .memory import peak_bytes
from .metrics import logit_metrics
from .original import SEVERAL, Expected, generated, outputs_of, row_errors, run_original
from .points import added_once, points_of
from .processes import Place, ProcessExchange, ProcessGroup, leave_together, own_store, place_of, run_all
from .rankmodel import connect, fetching, materialise
from .skeleton import Skeleton
from .stores import native_dtype, source_store
from .theory import theoretical
from .ways import LOCAL, chosen

LEVEL = "runtime"
TOKENS = 16
NEW_TOKENS = 16
SEQUENCES = 2
LEAST = 4.0  # times the dtype's epsilon, below which no gate goes


def runtime(
    shards: Shards,
    source: Source,
    *,
    compute: str = "native",
    mode: str = "auto",
    tokens: int = TOKENS,
    new_tokens: int = NEW_TOKENS,
    device: str = "cpu",
    seed: int = 0,
    gates: Callable[[str, float], float] | None = None,
    progress: Callable[[str], None] | None = None,
    trust_remote_code: bool = False,
) -> LevelVerdict:
    """Run the level: by processes of our own, or as one of those that ``torchrun`` started.

    Under torchrun every process calls this and gets the same verdict.

    Args:
        compute: ``native`` or ``fp32``; ``fp64`` is the other levels' and means native here.
        tokens: length of the prompt, at least 2.
        new_tokens: tokens to generate, where the model can.
        device: ``cpu``, or ``cuda``: NCCL where every rank has a GPU of its own, else gloo through the host.

    Raises:
        UsageError: torchrun started another number of processes than there are ranks; more tokens than positions.
        UnsupportedError: no such device, or the class is unknown.
        DamagedError: the shards are not of this source, or a rank's file is damaged.
        StorageError: a rank died, which is named, or reading failed.
    """
    started = time.monotonic()
    if compute not in ("native", "fp32", "fp64"):
        raise UsageError(f"'{compute}' is not a dtype to run in; choose native or fp32")
    if tokens < 2 or new_tokens < 0:
        raise UsageError(f"{tokens} tokens and {new_tokens} new ones make no run; give at least 2 and 0")
    device_of(device)
    if quantisation_of(source.config) is not None:
        raise UnsupportedError(
            "the weights are quantised, and the kernels of a method are an engine's: the level 'forward' runs the "
            "ranks, on the values of what they store"
        )
    require_same_tensors(shards, source)
    require_positions(source.root, shards.manifest, tokens)
    notes = []
    longest = longest_sequence(source.root, shards.manifest)
    if longest is not None and tokens + new_tokens > longest + 1:  # the last token made is not run itself
        room = longest + 1 - tokens
        notes.append(f"the table of {longest} positions leaves room for {room} of {new_tokens} new tokens")
        new_tokens = room
    way = chosen(shards, mode, trust_remote_code=trust_remote_code)
    size = shards.manifest.tp_size
    dtype = torch.float32 if compute == "fp32" else native_dtype(source)[0]
    task = {
        "shards": str(Path(shards.root).resolve()), "source": str(Path(source.root).resolve()), "mode": way.mode,
        "dtype": dtype, "tokens": tokens, "new_tokens": new_tokens, "device": device, "seed": seed,
        "trust": trust_remote_code,
    }  # fmt: skip
    if progress is not None:
        progress(f"{size} processes")
    given = launched()
    if given is None:
        verdict: LevelVerdict = run_all(size, task)
    elif given.size != size:
        raise UsageError(
            f"torchrun started {given.size} processes for shards of {size} ranks; start {size} in all "
            "(--nproc-per-node)"
        )
    else:
        verdict = _as_one_of(given, task)
    verdict.notes += [*notes, *way.notes]
    _regate(verdict, gates)
    verdict.seconds = time.monotonic() - started
    return verdict


def _regate(verdict: LevelVerdict, gates: Callable[[str, float], float] | None) -> None:
    """Apply the caller's gates, and write the findings."""
    for measure in verdict.measures:
        if gates is not None and measure.gate > 0 and measure.status != "skip":
            measure.gate = gates(measure.point, measure.gate)
        if measure.status != "skip":
            measure.status = "pass" if within(measure.error, measure.gate) else "fail"
        if measure.status == "fail":
            who = "" if measure.rank is None else f" of rank {measure.rank}"
            verdict.findings.append(
                Finding(
                    LEVEL,
                    "",
                    measure.point,
                    f"{measure.point}{who} differs from the original's by {measure.error:.3g} where "
                    f"{measure.gate:.3g} is allowed ({measure.note})",
                )
            )
    if verdict.findings and verdict.verdict == PASSED:
        verdict.verdict = FAILED


def _as_one_of(given: Launch, task: dict[str, Any]) -> LevelVerdict:
    import torch.distributed as dist

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    place = place_of(given.rank, given.size, given.local_rank, given.local_size, task["device"])
    store, _, _ = next(iter(dist.rendezvous("env://", given.rank, given.size)))
    atexit.register(leave_together, store, given.rank)
    return run_rank(place, store, task)


def run_rank(place: Place, store: Any, task: dict[str, Any]) -> LevelVerdict:
    """Run one rank in this process; every rank gets the verdict that rank 0 comes to."""
    with ProcessGroup(place, store) as group:
        expected = _original(place, task) if place.rank == 0 else None
        group.barrier()
        verdict = _Rank(group, task).run(expected)
        shared: list[LevelVerdict | None] = group.gather_objects(verdict)
        peaks = group.gather_objects(peak_bytes())
        out = shared[0]
        assert out is not None
        out.peak_memory = max(peaks)
        return out


def _inputs(
    skeleton: Skeleton, task: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Arguments of the forward, and the prompt to go on from: None where the model goes on from more than token ids."""
    inputs = inputs_for(skeleton, SEQUENCES, task["tokens"], task["seed"])
    inputs = {key: on_device(value, device) for key, value in inputs.items()}
    ids = inputs.get("input_ids")
    alone = not {"encoder_hidden_states", "encoder_outputs", "pixel_values"} & inputs.keys()
    return inputs, ids[:1] if alone and ids is not None and len(ids) == SEQUENCES else None


def _original(place: Place, task: Mapping[str, Any]) -> Expected | list[str]:
    """Run the original and let go of it again; names of tensors that hold NaN where there are some."""
    manifest = read_manifest(Path(task["shards"]))
    source = open_source(task["source"])
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    skeleton = Skeleton(source.root, shapes, task["dtype"], trust_remote_code=task["trust"])
    store = source_store(source)
    try:
        materialise(
            skeleton, lambda name: store.full(store.parts[name], task["dtype"]).clone(), place.device, trainable=False
        )
    finally:
        store.close()
    if store.not_finite:
        return list(store.not_finite)
    inputs, prompt = _inputs(skeleton, task, place.device)
    return run_original(skeleton, manifest, inputs, prompt, task["new_tokens"])


class _Rank:
    """One rank of the run."""

    def __init__(self, group: ProcessGroup, task: Mapping[str, Any]) -> None:
        self.group, self.place, self.task = group, group.place, task
        self.manifest = read_manifest(Path(task["shards"]))
        if self.manifest.tp_size != self.place.size:
            raise DamagedError(
                f"{task['shards']} holds {self.manifest.tp_size} ranks, not {self.place.size}; it was changed during "
                "the run"
            )
        self.sums: list[tuple[str, str]] = []
        self.exchange = ProcessExchange(group)
        self.skeleton = self._built()

    def _built(self) -> Skeleton:
        """The rank's model, from the shards' config and the rank's own file."""
        root, dtype, mode = Path(self.task["shards"]), self.task["dtype"], self.task["mode"]
        shapes = {tensor.name: tensor.shape for tensor in self.manifest.tensors}
        skeleton = Skeleton(root, shapes, dtype, trust_remote_code=self.task["trust"])
        self.points = points_of(skeleton, self.manifest)
        self.theory = theoretical(skeleton, self.manifest, self.points)
        if mode == LOCAL:
            localise(skeleton, self.manifest, self.place.rank)
        store = own_store(root, self.manifest, self.place.rank)
        try:
            fetch = fetching(store, mode, dtype, added_once(self.manifest), self.place.rank, shapes)
            materialise(skeleton, fetch, self.place.device, trainable=False)
        finally:
            store.close()
        connect(skeleton, self.manifest, self.points, store.parts, self.exchange, mode, self._watch)
        return skeleton

    def _watch(self, point: str, tensor: torch.Tensor) -> None:
        self.sums.append((point, _digest(tensor)))

    def run(self, expected: Expected | list[str] | None) -> LevelVerdict | None:
        """Prefill and decode; rank 0 returns the verdict."""
        broken = self.group.gather_objects(expected if isinstance(expected, list) else None)[0]
        if broken:
            text = f"the source itself holds NaN or Inf in {', '.join(broken[:5])}: outputs cannot be compared"
            return LevelVerdict(LEVEL, SOURCE_NAN, self.task["mode"], notes=[text])
        inputs, prompt = _inputs(self.skeleton, self.task, self.place.device)
        outputs, _ = outputs_of(self.skeleton, inputs)
        counts, elements = dict(self.exchange.tally.counts), dict(self.exchange.tally.elements)
        made = generated(self.skeleton, prompt, self.task["new_tokens"]) if self.task["new_tokens"] else None
        self._watch("logits", outputs)
        if made is not None:
            self._watch("generated logits", made[1])
        sums = self.group.gather_objects(self.sums)
        if not isinstance(expected, Expected):
            return None
        verdict = LevelVerdict(LEVEL, PASSED, self.task["mode"])
        self._compare(verdict, outputs.cpu(), expected)
        self._compare_text(verdict, made, expected)
        self._compare_ranks(verdict, sums)
        self._count(verdict, counts, elements)
        return verdict

    def _compare(self, verdict: LevelVerdict, found: torch.Tensor, expected: Expected) -> None:
        name = "logits" if expected.are_logits else "last_hidden_state"
        least = LEAST * torch.finfo(self.task["dtype"]).eps
        gate = max(SEVERAL * expected.noise, least)
        if found.shape != expected.outputs.shape:
            note = f"shape {list(found.shape)} where the original has {list(expected.outputs.shape)}"
            verdict.measures.append(
                Measure(name, name, "logits", None, float("inf"), None, float("inf"), gate, "fail", note)
            )
            return
        metrics = logit_metrics(found, expected.outputs)
        if expected.are_logits:
            verdict.logits = metrics
        error, note = metrics["rel_l2"], f"{self._dtype()}, prefill; the original's own noise is {expected.noise:.3g}"
        rows = row_errors(found, expected.outputs)
        if expert_counts(self.skeleton.model.config.get_text_config())[0]:
            # A token that stands between two experts goes to either, here as in the original's own noise.
            noise = float(expected.noise_rows.median())
            error, gate = float(rows.median()), max(SEVERAL * noise, least)
            note = f"{self._dtype()}, prefill, median of positions; the original's own noise is {noise:.3g}"
        verdict.measures.append(
            Measure(name, name, "logits", None, error, error, metrics["max_abs"], gate, "pass", note)
        )
        verdict.notes.append(
            f"worst position of the prefill: {float(rows.max()):.3g}; KL {metrics['kl']:.3g} (noise "
            f"{expected.noise_kl:.3g})"
        )

    def _compare_text(self, verdict: LevelVerdict, made: Any, expected: Expected) -> None:
        if made is None or expected.new_ids is None or expected.step_logits is None:
            verdict.notes.append(
                "nothing was generated: no new tokens were asked for, or the model needs more than token ids for them"
            )
            return
        ids, logits = made
        same = int((ids == expected.new_ids).long().cumprod(0).sum())
        compared = min(same + 1, len(ids))  # the logits of the first token that differs had the same past
        least = LEAST * torch.finfo(self.task["dtype"]).eps
        metrics = logit_metrics(logits[:compared], expected.step_logits[:compared])
        error = float(row_errors(logits[:compared], expected.step_logits[:compared]).median())
        noise = float(expected.noise_rows.median())
        verdict.measures.append(
            Measure(
                "decode", "decode", "logits", None, error, error, metrics["max_abs"],
                max(SEVERAL * 2 * noise, least), "pass",
                f"{self._dtype()}, with the cache, median of {compared} steps",
            )
        )  # fmt: skip
        if same == len(ids):
            verdict.notes.append(f"{same} greedy tokens are equal to the original's")
            verdict.measures.append(
                Measure(
                    "greedy text",
                    "decode",
                    "logits",
                    None,
                    0.0,
                    None,
                    0.0,
                    0.0,
                    "pass",
                    "tokens that differ without a tie",
                )
            )
            return
        top = expected.step_logits[same].double().topk(2).values
        margin, allowed = float(top[0] - top[1]), SEVERAL * expected.noise_abs
        tie = margin <= allowed
        verdict.notes.append(
            f"greedy text differs from token {same + 1} of {len(ids)} on, where the original's first choice leads by "
            f"{margin:.3g} and its own noise is {expected.noise_abs:.3g}: {'a tie' if tie else 'no tie'}"
        )
        verdict.measures.append(
            Measure(
                "greedy text",
                "decode",
                "logits",
                None,
                0.0 if tie else 1.0,
                None,
                margin,
                0.0,
                "pass",
                "tokens that differ without a tie",
            )
        )

    def _compare_ranks(self, verdict: LevelVerdict, sums: list[list[tuple[str, str]]]) -> None:
        """Every sum, and what comes out, must be the same on all ranks to the bit."""
        for rank, mine in enumerate(sums):
            odd = next((a[0] for a, b in zip(mine, sums[0], strict=False) if a != b), "")
            odd = odd or ("the number of sums" if len(mine) != len(sums[0]) else "")
            verdict.measures.append(
                Measure(
                    odd or "all sums",
                    "ranks",
                    "replicated",
                    rank,
                    float(bool(odd)),
                    None,
                    float(bool(odd)),
                    0.0,
                    "pass",
                    "equal to rank 0's to the bit",
                )
            )
        verdict.notes.append(f"{len(sums[0])} sums were compared between ranks to the bit")

    def _count(self, verdict: LevelVerdict, counts: dict[str, int], elements: dict[str, int]) -> None:
        dtype, width = traffic_dtype(self.manifest.tensors)
        verdict.collectives = {key.removeprefix("forward "): count for key, count in counts.items()}
        verdict.collective_bytes_per_token = sum(elements.values()) * width / (SEQUENCES * self.task["tokens"])
        verdict.collective_dtype = dtype
        due = {key: count for key, count in self.theory.items() if key.startswith("forward ")}
        verdict.notes.append(
            f"{self.place.size} processes over {self.place.backend} on {self.place.device.type}; collectives of a "
            f"pass: "
            f"{', '.join(f'{count} {key}' for key, count in verdict.collectives.items())}; in theory "
            f"{', '.join(f'{count} {key[8:]}' for key, count in due.items())}; "
            f"{verdict.collective_bytes_per_token:,.0f} bytes a token in {dtype}"
        )
        if counts != due:
            verdict.findings.append(Finding(LEVEL, "", "", f"a pass took the collectives {counts} where {due} are due"))

    def _dtype(self) -> str:
        return str(self.task["dtype"]).removeprefix("torch.")


def _digest(tensor: torch.Tensor) -> str:
    from xxhash import xxh3_128_hexdigest

    flat = tensor.detach().cpu().contiguous().flatten()
    return xxh3_128_hexdigest(memoryview(flat.view(torch.uint8).numpy()))
