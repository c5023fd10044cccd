"""Rules for quantised matrices: all tensors that stand for one hold the same units, and together they are the matrix.

Their roles are ``q:packed``, ``q:scale``, ``q:zero``, ``q:order``, ``q:state``; what holds the values in the matrix's
own shape has its role, ``q``. A weight whose scales or zero points are another rank's merges back exactly and is wrong
in every product: that is what these rules see. The matrix itself is then judged like any other, by its units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .axes import Axis
from .plancuts import CutDim, Spans, spans_text, unit_noun
from .planparts import Member, Said
from .roles import EMBED, ROW, VOCABULARY

Key = tuple[str, str]  # the module of a matrix, and its role


def matrices(members: Sequence[Member]) -> tuple[list[Member], list[Said]]:
    """The members with each quantised matrix as one, and what is wrong between the tensors that stand for it."""
    groups: dict[Key, list[Member]] = {}
    for member in members:
        if ":" in member.role:
            groups.setdefault(_key(member), []).append(member)
    if not groups:
        return list(members), []
    values = {_key(m): m for m in members if ":" not in m.role and not m.is_bias and _key(m) in groups}
    out = [member for member in members if ":" not in member.role]
    said: list[Said] = []
    for key, group in groups.items():
        whole = values.get(key)
        said += _agree([*([whole] if whole else []), *group])
        if whole is None:
            out.append(_as_one(key[1], group))
    return out, said


def _key(member: Member) -> Key:
    """What all tensors of one matrix have in common."""
    module, found, _ = member.name.partition(".weight.")  # bitsandbytes: q_proj.weight.absmax
    return module if found else member.name.rpartition(".")[0], member.role.partition(":")[0]


def _kind(member: Member) -> str:
    return member.role.partition(":")[2]


def _agree(group: Sequence[Member]) -> Iterator[Said]:
    """Whatever is cut along a view of an axis holds the same units of it; zero points are cut wherever scales are."""
    first = _reference(group)
    mine = _held(first)
    for member in group:
        for (axis, view), held in _held(member).items():
            theirs = mine.get((axis, view))
            if theirs is None:
                yield member, f"{member.name} is cut along {axis.describe()} ('{axis.name}'), and {first.name} is not"
                continue
            for rank, (own, due) in enumerate(zip(held, theirs, strict=True)):
                if own != due:
                    yield member, (
                        f"{member.name}: rank {rank} holds {unit_noun(axis, view)} {_told(own)}, and of {first.name}, "
                        f"which is of the same matrix, those are {_told(due)}"
                    )
                    break
    scales, zeros = ([m for m in group if _kind(m) == kind] for kind in ("scale", "zero"))
    for scale in scales:
        for zero in zeros:
            if len(scale.tensor.shape) == len(zero.tensor.shape) and _held(scale).keys() != _held(zero).keys():
                yield zero, f"{zero.name} is not cut along what {scale.name} is, and each belongs to the other"


def _told(streams: tuple[Spans, ...]) -> str:
    return ", ".join(dict.fromkeys(map(spans_text, streams)))


def _held(member: Member) -> dict[tuple[Axis, str], list[tuple[Spans, ...]]]:
    """By view, for every rank the units of each stream, streams that repeat each other once."""
    found: dict[tuple[Axis, str], list[list[Spans]]] = {}
    for _, cut in member.cuts:
        for stream, held in cut.held.items():
            of_view = found.setdefault((stream.axis, stream.view), [[] for _ in held])
            for mine, spans in zip(of_view, held, strict=True):
                if spans not in mine:
                    mine.append(spans)
    return {view: [tuple(streams) for streams in ranks] for view, ranks in found.items()}


def _reference(group: Iterable[Member]) -> Member:
    """The member that holds the values."""
    members = list(group)
    return next((m for m in members if _kind(m) in ("", "packed")), members[0])


def _as_one(role: str, group: Sequence[Member]) -> Member:
    """The matrix that the members stand for.

    Sizes and sides are those of the packed tensor, which are not the matrix's: ``packed`` says so. A vocabulary is
    judged by its padding too, so that the member counts that stores every row by itself.
    """
    chosen = _reference(group)
    if role in VOCABULARY:
        chosen = next((m for m in group if m.cuts and _by_unit(m)), chosen)
        in_units = [(number, _in_units(chosen, number, cut)) for number, cut in chosen.cuts]
        return Member(chosen.tensor._replace(role=role), in_units, packed=True)
    cuts = [(number, _once(cut) if role in ROW - EMBED else cut) for number, cut in chosen.cuts]
    return Member(chosen.tensor._replace(role=role), cuts, packed=True)


def _by_unit(member: Member) -> bool:
    return all(segment.per == 1 for dim in member.tensor.dims for segment in dim.segments)


def _in_units(member: Member, number: int, cut: CutDim) -> CutDim:
    """The dimension with its padding in units of the axis, of which some fill the last group."""
    padding = []
    segments = [segment for segment in member.tensor.dims[number].segments if segment.axis is not None]
    for rank, pad in enumerate(cut.padding):
        held = sum(stop - start for spans in cut.held.values() for start, stop in spans[rank])
        size, per = segments[0].size, segments[0].per
        padding.append((-(-held // per) + pad // size) * per - held)
    return replace(cut, padding=padding, sizes=dict.fromkeys(cut.sizes, 1))


def _once(cut: CutDim) -> CutDim:
    """A dimension in which every row of the matrix repeats the same units (a matrix in one line), as one row has it."""
    kept = {}
    seen: list[object] = []
    for stream, held in cut.held.items():
        what = stream.axis, stream.view, held
        if what not in seen:
            seen.append(what)
            kept[stream] = held
    return replace(cut, held=kept, sizes={stream: cut.sizes[stream] for stream in kept})
