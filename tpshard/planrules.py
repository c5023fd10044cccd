"""The level *plan*: static algebra on what every rank holds, without a weight, a table or torch.

Bytes merge back whatever the plan; a rank that must multiply its queries with other heads' keys shows
only when it runs, or here. Roles (``tpshard.manifest.Note``) say which tensors meet in the model: what
a column-parallel matrix makes, the row-parallel one that follows it must take, unit by unit and in the
same order. What no rule here can see is a table that misreads a fused matrix's order; the levels
*twin* and *forward* do. Formulas: Megatron-LM (arXiv 1909.08053) for the pairs, ``repeat_kv`` of
transformers' ``modeling_llama.py`` for the map from query to KV heads.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .manifest import NAME, Manifest
from .planblocks import blocks_of
from .plancuts import CutDim, Planned, held_twice, hole, planned, read_dim
from .planpacked import matrices
from .planparts import Member, judge_part
from .planvocabulary import judge_vocabulary
from .reports import Finding
from .roles import PARTS, VOCABULARY, WHOLE, Part
from .table import ADDED_ONCE, NEEDS_GATHER, NEEDS_SUM, UNUSED
from .traffic import NORM_ELEMENTS, traffic_dtype
from .verdicts import FAILED, NOT_RUN, PASSED, LevelVerdict

LEVEL = "plan"
_OUTS = frozenset(role for part in PARTS for role in part.outs)
_ROW = _OUTS.union(*(part.inner for part in PARTS))
_KNOWN = WHOLE | VOCABULARY | {"norm"} | {role for part in PARTS for role in part.roles}
_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")
_IN_NAMES = re.compile(r"\.\d+(?=\.)")
_HERE = "\0"  # stands for the layer's name in what is said of all layers that are cut alike


class Judged(NamedTuple):
    """Findings, how many of each kind of part were judged, and what no rule applies to.

    ``inner``: the widths of the sums inside parts (a state space's time step, B and C), one a layer.
    """

    findings: list[Finding]
    parts: Counter[str]
    layers: Counter[str]
    unjudged: list[str]
    inner: list[int]


def plan_verdict(manifest: Manifest) -> LevelVerdict:
    """Judge the plan that a manifest describes.

    Collectives in the verdict are by theory: one all-reduce after attention (or state space) and one
    after the feed-forward of every layer, one for the embedding, one gather for the head, one small
    sum for every norm along something cut; shared experts are summed by themselves.
    """
    began = time.perf_counter()
    judged = judge(planned(manifest), manifest.tp_size, manifest.aliases)
    count = sum(judged.parts.values())
    passed = FAILED if judged.findings else PASSED if count else NOT_RUN
    verdict = LevelVerdict(LEVEL, passed, findings=judged.findings)
    told = ", ".join(f"{number} {kind}" for kind, number in judged.parts.items())
    verdict.notes.append(f"judged: {told}" if told else "nothing was judged: no tensor has a role with a rule")
    if judged.unjudged:
        more = f" and {len(judged.unjudged) - 5} more" if len(judged.unjudged) > 5 else ""
        shown = ", ".join(judged.unjudged[:5]) + more
        verdict.notes.append(f"checked for holes only, their roles have no rule: {shown}")
    if manifest.tp_size > 1:
        verdict.collectives = {kind: number for kind, number in judged.layers.items() if number}
        verdict.collective_bytes_per_token = _payload(manifest, judged.layers, judged.inner)
        verdict.collective_dtype = traffic_dtype(manifest.tensors)[0]
    verdict.seconds = time.perf_counter() - began
    return verdict


def _payload(manifest: Manifest, layers: Mapping[str, int], inner: Sequence[int]) -> float | None:
    """Bytes of one token in the collectives of a forward pass, as :mod:`.traffic` counts them."""
    tables = [t for t in manifest.tensors if manifest.notes[t.name].role == "embed" and len(t.shape) == 2]
    if not tables:
        return None
    vocabulary, width = tables[0].shape
    hidden = next((w for t in manifest.tensors if (w := _summed_width(manifest, t.name, t.shape))), width)
    elements = (layers["all_reduce"] - 1 - len(inner)) * hidden + sum(inner)
    elements += width  # the table's own, which may be another (OPT-350M)
    elements += layers["all_gather"] * vocabulary + layers["norm_all_reduce"] * NORM_ELEMENTS
    return elements * traffic_dtype(manifest.tensors)[1]


def _summed_width(manifest: Manifest, name: str, shape: tuple[int, ...]) -> int:
    """How many outputs a row-parallel matrix at a part's end has; 0 for all else."""
    if manifest.notes[name].role not in _OUTS or len(shape) != 2:
        return 0
    whole = [length for length, dim in zip(shape, manifest.dims[name], strict=True) if not dim.axes]
    return whole[0] if len(whole) == 1 else 0


def judge(tensors: Mapping[str, Planned], tp_size: int, aliases: Mapping[str, str]) -> Judged:
    """Judge tensors by role and runs; ``aliases`` are tied tensors that are not stored themselves."""
    book = _Book(tp_size)
    members, said = matrices([book.member(tensor) for tensor in tensors.values()])
    for member, message in said:
        book.say(member.name, message)
    book.unjudged += [m.name for m in members if m.role.removesuffix("_bias") not in _KNOWN]
    for part in PARTS:
        _judge_parts(book, part, members)
    vocabulary = [m for m in members if m.role.removesuffix("_bias") in VOCABULARY]
    if vocabulary:
        book.parts["vocabulary tables"] += len(vocabulary)
        tied = [(alias, to) for alias, to in aliases.items() if to in tensors and tensors[to].role in ("embed", "head")]
        heads = {m.name for m in vocabulary if m.role == "head"} | {a for a, _ in tied if not _is_table(a)}
        book.layers["all_reduce"] += sum(_look_ups(m.name, tied) for m in vocabulary if m.role == "embed")
        book.layers["all_gather"] += len(heads)
        layers = _axes(m for m in members if any(m.role.removesuffix("_bias") in part.roles for part in PARTS))
        for member, message in judge_vocabulary(vocabulary, tp_size, layers):
            book.say(member.name, message)
    for alias, target in aliases.items():
        if target not in tensors:
            book.say(target, f"{target} is on no rank, and {alias} is tied to it")
        elif alias in tensors and tensors[alias].parts != tensors[target].parts:
            book.say(alias, f"{alias} is tied to {target}, but the ranks hold other ranges of it")
    book.layers["all_reduce"] += len(book.inner)
    return Judged(book.findings(), book.parts, book.layers, book.unjudged, book.inner)


def _is_table(name: str) -> bool:
    """Whether a tied tensor is looked up, as transformers calls it (``encoder.embed_tokens``), and is no head."""
    return "embed" in name


def _look_ups(name: str, tied: Sequence[tuple[str, str]]) -> int:
    """How often the table ``name`` is looked up in a pass: by each of its other names, or by itself."""
    return sum(to == name and _is_table(alias) for alias, to in tied) or 1


class _Book:
    """Findings by pattern: a fault that repeats in every layer is said once, with a count."""

    def __init__(self, tp_size: int) -> None:
        self.tp_size = tp_size
        self.parts: Counter[str] = Counter()
        self.layers: Counter[str] = Counter()
        self.unjudged: list[str] = []
        self.inner: list[int] = []
        self._said: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._read: dict[tuple[int, int, int], CutDim] = {}
        self._own: dict[tuple[object, ...], list[str]] = {}

    def say(self, name: str, message: str) -> None:
        kind = _IN_NAMES.sub(".#", name), _IN_NAMES.sub(".#", message)
        self._said.setdefault(kind, []).append((name, message))

    def findings(self) -> list[Finding]:
        out = []
        for said in self._said.values():
            name, message = said[0]
            more = f" (and {len(said) - 1} more like it, to {said[-1][0]})" if len(said) > 1 else ""
            out.append(Finding(LEVEL, NAME, name, message + more))
        return out

    def member(self, tensor: Planned) -> Member:
        """The tensor with its dimensions along axes read back, and judged by itself."""
        cuts = []
        for number, (dim, part) in enumerate(zip(tensor.dims, tensor.parts, strict=True)):
            if dim.axes:
                key = id(dim), id(part), len(tensor.dims) - 1 - number
                if key not in self._read:
                    self._read[key] = read_dim(dim, part, key[2])
                cuts.append((number, self._read[key]))
        member = Member(tensor, cuts)
        key_own = (tensor.role, tensor.note, tensor.shape, id(tensor.dims), id(tensor.parts))
        if key_own not in self._own:
            self._own[key_own] = list(self._by_itself(member))
        for message in self._own[key_own]:
            self.say(tensor.name, message.replace(_HERE, tensor.name))
        return member

    def _by_itself(self, member: Member) -> Iterable[str]:
        tensor, role = member.tensor, member.role
        base = role.removesuffix("_bias")
        for number, (dim, part) in enumerate(zip(tensor.dims, tensor.parts, strict=True)):
            if dim.extent != tensor.shape[number] or part.extent != tensor.shape[number]:
                length = tensor.shape[number]
                yield f"{_HERE} has {length} indices in dimension {number}, and its cut is for {part.extent}"
            if not dim.axes and not part.is_whole:
                yield f"{_HERE} is cut in dimension {number}, and nothing says along what"
        for _, cut in member.cuts:
            yield from (f"{_HERE}: {fault}" for fault in cut.faults[:3])
        twice = held_twice(tensor) or hole(tensor, self.tp_size)
        if twice:
            yield f"{_HERE}: {twice}"
        if base in WHOLE and member.cuts and tensor.note != NEEDS_GATHER and role != "gathered_bias":
            yield f"{_HERE} ({role}) is cut, and every rank needs it whole"
        if base == "norm":
            if member.cuts and tensor.note != NEEDS_SUM:
                yield f"{_HERE} is a norm along something cut, and nothing says that it needs a sum over ranks"
            if not member.cuts and tensor.note == NEEDS_SUM:
                yield f"{_HERE} is said to need a sum over ranks, and is whole"
        elif tensor.note == NEEDS_SUM:
            yield f"{_HERE} ({role}) is said to need a sum over ranks, and is no norm"
        once = role.endswith("_bias") and base in _ROW
        if once and not member.cuts and tensor.note != ADDED_ONCE:
            yield f"{_HERE} is a bias, whole on every rank, and nothing says that it is added once, after the sum"
        if tensor.note == ADDED_ONCE and (member.cuts or not once):
            yield f"{_HERE} ({role}) is said to be added once, and is no whole bias of a row-parallel matrix"


def _judge_parts(book: _Book, part: Part, members: Sequence[Member]) -> None:
    """Sort the members of one kind of part by layer (and expert), and judge every layer that differs."""
    scopes: dict[str, list[Member]] = {}
    norms: dict[str, list[Member]] = {}
    for member in members:
        base = member.role.removesuffix("_bias")
        if base in part.roles and member.tensor.note != UNUSED:
            scopes.setdefault(_scope(member.name, part), []).append(member)
        elif base == "norm":
            norms.setdefault(_scope(member.name, part), []).append(member)
    _judge_shared(book, part, scopes)
    known: dict[tuple[object, ...], list[tuple[str, str]]] = {}
    extra = {_layer(m.name) for m in members if m.role.startswith("prediction_")}
    summed: set[object] = set()
    for scope, of_scope in scopes.items():
        for number, found in enumerate(blocks_of(part, of_scope)):
            book.parts[f"{part.name} parts"] += 1
            layer = _layer(scope)
            if layer not in extra and any(m.cuts for m in found if m.role in part.outs):
                summed.add(layer if part.name == "experts" else (scope, number))
            # layers for prediction are not run when a model serves
            if layer not in extra:
                book.inner += [_width(m) for m in found if m.role in part.inner and m.cuts]
            _judge_block(book, part, scope, found, norms.get(scope, ()), known)
    book.layers["all_reduce"] += len(summed)
    book.layers["norm_all_reduce"] += sum(
        m.role == "norm" and any(cut.axes and cut.axes[0] in _axes(scopes.get(scope, ())) for _, cut in m.cuts)
        for scope, of_scope in norms.items() for m in of_scope
    )  # fmt: skip


def _width(member: Member) -> int:
    """How many outputs a row-parallel matrix has: the dimension of it that is not cut."""
    cut = {number for number, _ in member.cuts}
    return next((length for number, length in enumerate(member.tensor.shape) if number not in cut), 1)


def _judge_block(
    book: _Book, part: Part, scope: str, found: list[Member], norms: Sequence[Member],
    known: dict[tuple[object, ...], list[tuple[str, str]]],
) -> None:  # fmt: skip
    """Judge a block, or say what was found of another that is cut alike."""
    with_norms = [*found, *norms]
    key = tuple(
        [(m.name[len(scope) :], m.role, m.tensor.shape, id(m.tensor.dims), id(m.tensor.parts)) for m in with_norms]
    )
    if key not in known:
        known[key] = [
            (member.name[len(scope) :], message.replace(scope, _HERE) if scope else message)
            for member, message in judge_part(part, found, norms, book.tp_size)
        ]
    for rest, message in known[key]:
        book.say(scope + rest, message.replace(_HERE, scope))


def _judge_shared(book: _Book, part: Part, scopes: dict[str, list[Member]]) -> None:
    """Values of single units outside the layers (one table of position biases for all) follow every layer's units."""
    outside = scopes.get("", [])
    own = _axes(m for m in outside if m.role.removesuffix("_bias") not in part.each)
    shared = [m for m in outside if m.role.removesuffix("_bias") in part.each and not own & _axes([m])]
    if len(shared) == len(outside):
        scopes.pop("", None)
    elif shared:
        scopes[""] = [m for m in outside if m not in shared]
    for scope in [s for s, found in scopes.items() if all(m.role.removesuffix("_bias") in part.each for m in found)]:
        shared += scopes.pop(scope)  # a table that is kept under a number of its own (UDOP's)
    for member in shared:
        met = [found for found in scopes.values() if _axes(found) & _axes([member])]
        said = [f"{member.name} stands alone: no layer's {part.name} has anything along its axis"] if not met else []
        for found in met:
            judged = judge_part(part, [*found, member], (), book.tp_size)
            said += [message for who, message in judged if who is member and message not in said]
        for message in said:
            book.say(member.name, message)


def _axes(members: Iterable[Member]) -> set[object]:
    return {axis for member in members for _, cut in member.cuts for axis in cut.axes}


def _layer(name: str) -> str:
    """A name up to its first number: the layer."""
    found = _NUMBER.search(name)
    return name[: found.end()] if found else ""


def _scope(name: str, part: Part) -> str:
    """The layer of a tensor; for experts that are stored apart, the expert; of a pair, the module of its matrices."""
    if part.name in ("projector", "low rank"):
        return name.rsplit(".", 2)[0]
    if part.name != "experts":
        return _layer(name)
    numbers = list(_NUMBER.finditer(name))
    return name[: numbers[-1].end()] if numbers else ""
