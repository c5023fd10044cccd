"""The level *plan* for an adapter: static algebra on what every rank holds of its pairs of matrices.

An adapter's pairs meet the matrices of its base and not each other. So every pair is judged by itself (of A and
B one is cut, and never along the rank), and all tensors along one axis against each other: whatever lies along
the heads, the channels or the vocabulary holds the same units on every rank, and those that are summed over
ranks hold each once. Roles are those of the adapted matrix with ``_lora_a``, ``_lora_b``, ``_lora_bias``,
``_lora_magnitude`` or ``_tokens``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .adapters import PARTIAL
from .axes import Axis
from .lora import piece_of
from .manifest import NAME, Manifest
from .plancuts import (
    CutDim,
    Planned,
    Spans,
    held_twice,
    hole,
    planned,
    read_dim,
    spans_text,
    tiling_fault,
    unit_noun,
)
from .planparts import Member
from .planrules import LEVEL
from .planvocabulary import judge_vocabulary
from .reports import Finding
from .roles import COLUMN, ROW, VOCABULARY
from .table import ADDED_ONCE, NEEDS_SUM
from .verdicts import FAILED, NOT_RUN, PASSED, LevelVerdict

_NOTES = {  # that of a pair whose product is summed over ranks
    "_lora_a": PARTIAL,
    "_lora_b": PARTIAL,
    "_lora_bias": ADDED_ONCE,
    "_lora_magnitude": NEEDS_SUM,
}
_CUT = COLUMN | ROW | VOCABULARY
Said = tuple[str, str]  # tensor, message


class _Held(NamedTuple):
    """What a tensor holds of a view of an axis, by rank."""

    tensor: Planned
    held: list[Spans]


def adapter_plan_verdict(manifest: Manifest) -> LevelVerdict:
    """Judge the plan of an adapter's shards. An adapter adds no collective of its own but DoRA's small sums."""
    began = time.perf_counter()
    tensors = planned(manifest)
    pairs = _pairs(tensors)
    findings = [Finding(LEVEL, NAME, name, message) for name, message in judge_adapter(tensors, manifest.tp_size)]
    verdict = LevelVerdict(LEVEL, FAILED if findings else PASSED if pairs else NOT_RUN, findings=findings)
    verdict.notes.append(f"judged: {len(pairs)} pairs of adapter matrices")
    others = sum(not _kind(tensor.role) for tensor in tensors.values())
    if others:
        verdict.notes.append(f"and {others} tensors beside them, by the axes that they share")
    if manifest.tp_size > 1:
        sums = sum(t.note == NEEDS_SUM and _kind(t.role) == "_lora_magnitude" for t in tensors.values())
        verdict.collectives = {"norm_all_reduce": sums} if sums else {}
    verdict.seconds = time.perf_counter() - began
    return verdict


def judge_adapter(tensors: Mapping[str, Planned], tp_size: int) -> Iterator[Said]:
    """What is wrong with the cuts of an adapter's tensors: ``(tensor, message)``."""
    views: dict[tuple[Axis, str], list[_Held]] = defaultdict(list)
    vocabulary: list[Member] = []
    for name, tensor in tensors.items():
        for number, (dim, part) in enumerate(zip(tensor.dims, tensor.parts, strict=True)):
            if dim.extent != tensor.shape[number] or part.extent != tensor.shape[number]:
                yield name, f"{name} has {tensor.shape[number]} indices in dimension {number}, its cut {part.extent}"
            if dim.axes:
                cut = read_dim(dim, part, len(tensor.dims) - 1 - number)
                if tensor.role.removesuffix(_kind(tensor.role)) in VOCABULARY:
                    vocabulary.append(Member(tensor, [(number, cut)]))
                yield from ((name, f"{name}: {fault}") for fault in cut.faults[:3])
                _collect(views, tensor, cut)
            elif not part.is_whole:
                yield name, f"{name} is cut in dimension {number}, and nothing says along what"
        fault = held_twice(tensor) or hole(tensor, tp_size)
        if fault:
            yield name, f"{name}: {fault}"
    for members in _pairs(tensors).values():
        yield from _judge_pair(members, tp_size)
    for (axis, view), found in views.items():
        yield from _judge_view(axis, view, found, tp_size)
    for axis in dict.fromkeys(axis for axis, _ in views):
        yield from _judge_groups(axis, views)
    yield from ((member.name, message) for member, message in judge_vocabulary(vocabulary, tp_size))


def _collect(views: dict[tuple[Axis, str], list[_Held]], tensor: Planned, cut: CutDim) -> None:
    for stream, held in cut.held.items():
        views[stream.axis, stream.view].append(_Held(tensor, held))


def _kind(role: str) -> str:
    return next((kind for kind in _NOTES if role.endswith(kind)), "")


def _pairs(tensors: Mapping[str, Planned]) -> dict[tuple[str, str], dict[str, Planned]]:
    """The tensors of every pair by kind; a pair is what comes before ``lora_`` in the names, and the adapter's own."""
    pairs: dict[tuple[str, str], dict[str, Planned]] = defaultdict(dict)
    for name, tensor in tensors.items():
        kind = _kind(tensor.role)
        if kind:
            piece = piece_of(name)
            pairs[piece.pair, tensor.role.removesuffix(kind)][kind] = tensor
    return dict(pairs)


def _judge_pair(members: Mapping[str, Planned], tp_size: int) -> Iterator[Said]:
    """Of A and B one is cut, along what the base is cut along; what goes with B is cut as B's outputs are."""
    first, second = members.get("_lora_a"), members.get("_lora_b")
    if first is None or second is None:
        known = first or second or next(iter(members.values()))
        yield known.name, f"{known.name} stands alone: its pair lacks {'lora_B' if second is None else 'lora_A'}"
        return
    base = first.role.removesuffix("_lora_a")
    for tensor, rank in ((first, 0), (second, 1)):
        if not tensor.parts[rank].is_whole:
            yield tensor.name, f"{tensor.name} is cut along the rank of its pair, which every rank of the group needs"
    inputs, outputs = first.parts[1], second.parts[0]
    if not inputs.is_whole and not outputs.is_whole:
        yield second.name, f"{first.name} and {second.name} are both cut: only parts of their product are on any rank"
    if tp_size > 1 and base in _CUT and not any(dim.axes for dim in (*first.dims, *second.dims)):
        yield second.name, f"{first.name} and {second.name} are whole on every rank, and their base ({base}) is cut"
    summed = bool(first.dims[1].axes)
    for kind, tensor in members.items():
        due = _NOTES[kind] if summed else ""
        of_base = kind == "_lora_b" and not summed and tensor.note not in _NOTES.values()
        if tensor.note != due and not of_base:
            yield tensor.name, f"{tensor.name} has the note {tensor.note!r}, and {due or 'none'!r} is due"
        if kind not in ("_lora_a", "_lora_b") and tensor.parts != second.parts[:1]:
            yield tensor.name, f"{tensor.name} is cut otherwise than the outputs of {second.name}"


def _judge_view(axis: Axis, view: str, found: list[_Held], tp_size: int) -> Iterator[Said]:
    """All tensors along a view hold the same units; where they are summed or gathered over ranks, each once."""
    first = found[0]
    units = unit_noun(axis, view)
    for other in found[1:]:
        for rank, (mine, theirs) in enumerate(zip(other.held, first.held, strict=True)):
            if mine != theirs:
                held = f"rank {rank} holds {units} {spans_text(mine)}, and of {first.tensor.name} those are"
                yield other.tensor.name, f"{other.tensor.name}: {held} {spans_text(theirs)}"
                break
    if view != "kv" and not axis.is_whole(tp_size):
        fault = tiling_fault(first.held, axis.views()[view])
        if fault:
            yield first.tensor.name, f"{first.tensor.name}: of the {units}, {fault}"


def _judge_groups(axis: Axis, views: Mapping[tuple[Axis, str], list[_Held]]) -> Iterator[Said]:
    """The KV heads of a rank are those that its query heads use."""
    query, kv = views.get((axis, "query")), views.get((axis, "kv"))
    if not query or not kv:
        return
    group = axis.views()["query"] // axis.views()["kv"]
    for rank, (mine, theirs) in enumerate(zip(kv[0].held, query[0].held, strict=True)):
        if mine != _used(theirs, group):
            held = f"rank {rank} holds {unit_noun(axis, 'kv')} {spans_text(mine)}, and its {unit_noun(axis, 'query')}"
            yield kv[0].tensor.name, f"{kv[0].tensor.name}: {held} {spans_text(theirs)} use others"
            break


def _used(query: Spans, group: int) -> Spans:
    """The KV heads that query heads use, ``group`` of which share one."""
    out: list[tuple[int, int]] = []
    for start, stop in query:
        low, high = start // group, -(-stop // group)
        if out and low <= out[-1][1]:
            out[-1] = out[-1][0], high
        else:
            out.append((low, high))
    return tuple(out)
