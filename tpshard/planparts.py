"""Rules for tensors that meet: column-parallel makers and the row-parallel taker, KV heads, the vocabulary.

Every rule gives ``(member, message)`` pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .axes import Axis
from .plancuts import CutDim, Planned, Spans, spans_text, tiling_fault, unit_noun, units_of
from .roles import Part
from .table import AFTER_SUM

Said = tuple["Member", str]
_MOST_HEADS = 2**16  # on one rank: a guard against hostile manifests, models have at most a few hundred


@dataclass(frozen=True)
class Member:
    """A tensor and its dimensions along axes, each with its number.

    ``packed`` ones stand for a quantised matrix: their units are the matrix's, their sizes and sides are not.
    """

    tensor: Planned
    cuts: Sequence[tuple[int, CutDim]]
    packed: bool = False

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def role(self) -> str:
        return self.tensor.role

    @property
    def bank(self) -> CutDim | None:
        """The dimension over stacked experts, where the experts themselves are dealt to ranks."""
        return next((cut for number, cut in self.cuts if self.stacked and number == 0), None)

    @property
    def stacked(self) -> bool:
        """Whether the tensor is a bank of experts."""
        return self.role.startswith("expert_") and len(self.tensor.shape) == (2 if self.is_bias else 3)

    @property
    def is_grouped(self) -> bool:
        """Whether the tensor is a convolution of width one, whose groups may each hold a run of units."""
        return len(self.tensor.shape) == 3 and self.tensor.shape[-1] == 1 and not self.packed

    @property
    def main(self) -> CutDim | None:
        """The dimension along the part's own axis."""
        bank = self.bank
        return next((cut for _, cut in self.cuts if cut is not bank), None)

    @property
    def is_bias(self) -> bool:
        return self.role.endswith("_bias")


def judge_part(part: Part, members: Sequence[Member], norms: Sequence[Member], tp_size: int) -> Iterator[Said]:
    """Judge the tensors of one part of one layer against each other."""
    outs = [m for m in members if m.role in part.outs]
    ins = [m for m in members if m.role in part.ins]
    if not outs or not ins:
        lacking = "row-parallel matrix that takes its product" if ins else "column-parallel matrix that makes its input"
        for member in (ins or outs or members)[:1]:
            yield member, f"{member.name} stands alone: no {lacking} is in the {part.name} of its layer"
        return
    yield from _banks(members)
    out = outs[0]
    if out.main is None and out.bank is not None:
        yield from ((m, f"{m.name} is cut and {out.name} is not") for m in ins if m.main is not None)
        return
    if out.main is None:
        if tp_size > 1:
            yield out, f"{out.name} is whole on every rank: the sum over ranks would be {tp_size} times too large"
        return
    axis = out.main.axes[0]
    view = "query" if "query" in axis.views() else "unit"
    # Experts that lie under each other in one matrix repeat the units of their axis, every one in the same way.
    banked = len(out.main.held) if out.role == "expert_down" and len(out.tensor.shape) == 2 else 1
    held = next(iter(out.main.held.values()))
    # Two kinds of attention may share the output matrix, and Zamba's state-space heads are each cut inside.
    joint = part.name in ("attention", "state space")
    if len(out.main.axes) != 1 or (len(out.main.held) != banked and not joint) or any(
        stream.view != view or of_stream != held for stream, of_stream in out.main.held.items()
    ):  # fmt: skip
        yield out, f"{out.name} does not take the {unit_noun(axis, view)} of one axis, each once"
        return
    fault = tiling_fault(held, axis.views()[view])
    if fault:
        yield out, f"{out.name}: of the {unit_noun(axis, view)}, {fault}; the sum over ranks takes each once"
    summed = part.outs | part.inner  # their biases are added after the sum
    others = [m for m in members if m not in outs and not (m.is_bias and m.role.removesuffix("_bias") in summed)]
    others = _together(others)
    ins = [m for m in others if m.role in part.ins]
    for member in others + [m for m in outs[1:] if m.main is not None and m.main.axes[0] == axis]:
        yield from _follows(member, out, axis, view, held)
    yield from ((m, f"{m.name} is whole on every rank, and {out.name} beside it is cut") for m in outs if not m.main)
    yield from _counts(ins, out, axis, view, banked)
    yield from _halves(ins, axis)
    yield from _sizes(part, ins, out, banked)
    if banked == 1:  # else the units are the rows of every matrix
        yield from _sides(ins, out)
    yield from _key_values([*others, *norms], axis, out, held)
    yield from _norms(norms, ins, axis, view, held, out)


def _together(members: Sequence[Member]) -> list[Member]:
    """The members, those of one role as one that hold its units only between them (Zaya's two halves of the values)."""
    parts: dict[str, list[Member]] = {}
    for member in members:
        if member.main and all(_covers(held, s.axis.views()[s.view]) for s, held in member.main.held.items()):
            parts.setdefault(member.role, []).append(member)
    out = [m for m in members if m not in parts.get(m.role, ())]
    for first, *others in parts.values():
        assert first.main is not None
        joint = {stream: list(held) for stream, held in first.main.held.items()}
        for other in others:
            for stream, held in other.main.held.items() if other.main else ():
                mine = joint.setdefault(stream, [() for _ in held])
                joint[stream] = [_union(*both) for both in zip(mine, held, strict=True)]
        out.append(replace(first, cuts=[(first.cuts[0][0], replace(first.main, held=joint))]))
    return out


def _union(one: Spans, other: Spans) -> Spans:
    """Units that are in either, as few spans where both are in order, else as they are."""
    if list(one) != sorted(one) or list(other) != sorted(other):
        return one + other
    out: list[tuple[int, int]] = []
    for start, stop in sorted((*one, *other)):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return tuple(out)


def _banks(members: Sequence[Member]) -> Iterator[Said]:
    """Stacked experts that are dealt to ranks: the same ones for every bank, each on one rank."""
    banks = [(m, m.bank) for m in members if m.bank is not None]
    if not banks:
        return
    first, reference = banks[0]
    assert reference is not None
    for stream, held in reference.held.items():
        fault = tiling_fault(held, stream.axis.views()[stream.view])
        if fault:
            yield first, f"{first.name}: of the experts, {fault}"
    for member in members:
        if member.bank is None or member.bank.held != reference.held:
            yield member, f"{member.name} has other experts on the ranks than {first.name}"


def _follows(member: Member, out: Member, axis: Axis, view: str, held: Sequence[Spans]) -> Iterator[Said]:
    """Every stream of units that the row-parallel matrix takes is the same, rank by rank and in order."""
    main = member.main
    if main is None:
        yield member, f"{member.name} is whole on every rank, and {out.name}, which takes what it makes, is cut"
        return
    for stream, of_member in main.held.items():
        if stream.axis != axis:
            yield member, (
                f"{member.name} is cut along {stream.axis.describe()} ('{stream.axis.name}'), and {out.name}, "
                f"which takes what it makes, along {axis.describe()} ('{axis.name}')"
            )
            return
        if stream.view != view:
            continue
        for rank, (mine, theirs) in enumerate(zip(of_member, held, strict=True)):
            if mine != theirs:
                part = f" (part {stream.slot + 1} of it)" if stream.slot else ""
                yield member, (
                    f"{member.name}{part}: rank {rank} holds {unit_noun(axis, view)} {spans_text(mine)}, "
                    f"and of {out.name} those are {spans_text(theirs)}"
                )
                break


_KV = ((0, 1), (1, 0), (0, 2), (2, 0))  # twice: pairs of a head of the first half and one of the second
_PATTERNS: dict[str, tuple[tuple[int, int], ...]] = {  # streams a role may have: (query or unit, kv)
    "q": ((1, 0), (2, 0)), "q_gate": ((1, 0),), "q_b": ((1, 0),), "kv_b": ((1, 0),), "k": _KV, "v": _KV,
    "kv": ((0, 2), (2, 0)), "qkv": ((1, 2), (3, 0)),
    "qkv_gate": ((2, 2), (4, 0)), "gate": ((1, 0),), "up": ((1, 0),), "gate_up": ((1, 0), (2, 0)),
}  # fmt: skip


def _counts(ins: Sequence[Member], out: Member, axis: Axis, view: str, banked: int) -> Iterator[Said]:
    """A fused matrix holds every stream that its role promises, once an expert in it: q, k and v, gate and up."""
    for member in ins:
        allowed = _PATTERNS.get(member.role.removeprefix("expert_").removeprefix("shared_"))
        if allowed is None or member.main is None:
            continue
        streams = [stream for stream in member.main.held if stream.axis == axis]
        found = sum(s.view == view for s in streams), sum(s.view != view for s in streams)
        times = banked * _groups(member, out)
        if found not in [(a * times, b * times) for a, b in allowed]:
            yield member, (
                f"{member.name} ({member.role}) holds {found[0]} runs of {unit_noun(axis, view)} and "
                f"{found[1]} others, where its role has {' or '.join(f'{a} and {b}' for a, b in allowed)}"
            )
            continue
        for stream in streams:
            fault = _covers(member.main.held[stream], axis.views()[stream.view])
            if fault:
                yield member, f"{member.name}: {unit_noun(axis, stream.view)} {fault} on no rank"


def _groups(member: Member, out: Member) -> int:
    """In how many groups ``out`` takes what ``member`` makes, each with a run of all units; 1 but for convolutions."""
    if not (member.is_grouped and out.is_grouped):
        return 1
    return max(member.tensor.shape[0] // max(out.tensor.shape[1], 1), 1)


def _halves(ins: Sequence[Member], axis: Axis) -> Iterator[Said]:
    """Where the heads of a part are pairs, one of each half, they are so in q, k and v: all have a run a half."""
    parts = [m for m in ins if m.role in ("q", "k", "v") and m.main is not None]
    runs = {m.name: sum(stream.axis == axis for stream in m.main.held) for m in parts if m.main is not None}
    for member in parts[1:]:
        if runs[member.name] != runs[parts[0].name]:
            yield member, (
                f"{member.name} holds {runs[member.name]} runs of heads, where {parts[0].name} holds "
                f"{runs[parts[0].name]}: heads are in pairs in all of q, k and v, or in none"
            )


def _covers(held: Sequence[Spans], count: int) -> str:
    end = 0
    for start, stop in sorted(span for of_rank in held for span in of_rank):
        if start > end:
            return f"{end}:{start} are"
        end = max(end, stop)
    return f"{end}:{count} are" if end < count else ""


def _sizes(part: Part, ins: Sequence[Member], out: Member, banked: int) -> Iterator[Said]:
    """Head sizes and channel widths agree: q with k, v with o, gate and up with down."""
    taken = next(iter(out.main.sizes.values())) if out.main and not out.packed else 0
    # Where two have one role, the one in two dimensions counts: with three, heads may be a dimension of their own.
    made = [m for m in sorted(ins, key=lambda m: len(m.tensor.shape) == 2 or m.is_grouped) if m.main]
    sizes = {m.role.removeprefix("expert_").removeprefix("shared_"): m for m in made if not m.packed}

    def of(role: str) -> list[int]:
        found = sizes.get(role)
        return list(found.main.sizes.values()) if found and found.main else []

    pairs: list[tuple[str, list[int], str, list[int]]] = [("v", of("v"), "o", [taken])]
    pairs.append(("q", of("q"), "k", of("k")))
    if part.name != "attention" and part.name != "state space":
        for role in ("gate", "up"):
            times = banked * (_groups(sizes[role], out) if role in sizes else 1)
            pairs.append((role, of(role), "down", [taken] * times))
        fused = of("gate_up")
        joined = [taken] * 2 * banked if len(fused) == 2 * banked else [2 * taken] * banked
        pairs.append(("gate_up", fused, "down", joined if fused else []))
    fused = of("qkv")
    if len(fused) == 3:
        pairs.append(("qkv", fused, "o", [taken] * 3))
    for role, mine, other, theirs in pairs:
        if mine and theirs and 0 not in theirs and mine != theirs and not (role == "v" and sum(mine) == sum(theirs)):
            member = sizes[role]
            yield member, f"{member.name} has {mine} indices a unit, where {other} of its layer implies {theirs}"


def _sides(ins: Sequence[Member], out: Member) -> Iterator[Said]:
    """Makers are cut along what they make and the taker along what it takes: never the same side of a matrix."""
    if out.main is None or out.packed:
        return
    for member in ins:
        # With three dimensions (input, heads, head size), the side does not tell input from output; with banks it does.
        dims = len(member.tensor.shape) - (member.tensor.shape[-1:] == (1,)) - member.stacked
        matrix = dims == 2 and member.role != "ssm_conv" and not member.packed
        if matrix and member.main is not None and member.main.side == out.main.side:
            yield member, (
                f"{member.name} and {out.name} are cut along the same side of their matrices "
                f"(the {_side(out.main.side)} dimension): one along its input, the other along its output"
            )


def _side(side: int) -> str:
    return ("last", "second to last", "third to last")[min(side, 2)]


def _key_values(members: Sequence[Member], axis: Axis, out: Member, held: Sequence[Spans]) -> Iterator[Said]:
    """k and v agree, and every query head of a rank meets its own group's KV head there.

    A rank repeats each of its KV heads for as many consecutive query heads as it has of them.
    """
    views = axis.views()
    if "kv" not in views:
        return
    group = views["query"] // views["kv"]
    first: tuple[Member, Sequence[Spans]] | None = None
    for member in members:
        for stream, of_member in member.main.held.items() if member.main else ():
            if stream.axis != axis or stream.view != "kv":
                continue
            if first is None:
                first = member, of_member
                continue
            for rank, (mine, theirs) in enumerate(zip(of_member, first[1], strict=True)):
                if mine != theirs:
                    noun = unit_noun(axis, "kv")
                    yield member, (
                        f"{member.name}: rank {rank} holds {noun} {spans_text(mine)}, and of {first[0].name} "
                        f"those are {spans_text(theirs)}"
                    )
                    break
    if first is None:
        return
    member, kv = first
    for rank, (spans, own) in enumerate(zip(held, kv, strict=True)):
        if max(sum(stop - start for start, stop in some) for some in (spans, own)) > _MOST_HEADS:
            yield member, f"{member.name}: rank {rank} holds more heads than the {_MOST_HEADS} that can be judged"
            break
        query, heads = units_of(spans), units_of(own)
        if not query and not heads:
            continue
        each = len(query) // len(heads) if heads and len(query) % len(heads) == 0 else 0
        wrong = [q for at, q in enumerate(query) if not each or heads[at // each] != q // group]
        if wrong or not query:
            one = unit_noun(axis, "query")
            what = (
                f"{one} {spans_text(spans)} meet {unit_noun(axis, 'kv')} {spans_text(own)}"
                + (f", where head {wrong[0]} belongs to {wrong[0] // group}" if wrong else "")
            )
            yield member, f"{member.name}: on rank {rank}, {what} ({out.name} takes those {one})"
            break


def _norms(
    norms: Sequence[Member], makers: Sequence[Member], axis: Axis, view: str, held: Sequence[Spans], out: Member
) -> Iterator[Said]:
    """A norm along the part's axis has its units; beside the makers, one as wide as what they make is not whole."""
    widths = {
        (_module(m.name), m.tensor.shape[number])
        for m in makers
        for number, cut in m.cuts
        if any(stream.axis.views()[stream.view] > 1 for stream in cut.held)  # one KV head is as wide as its norm
    }
    latent = any(m.role in ("q_b", "kv_b") for m in makers)
    for norm in norms:
        if norm.main is None and norm.tensor.note == AFTER_SUM:
            continue
        if norm.main is None:
            module = _module(norm.name)
            if not latent and any(module == parent and norm.tensor.shape == (width,) for parent, width in widths):
                yield norm, (
                    f"{norm.name} spans all {norm.tensor.shape[0]} indices of what is cut in {module}, and is whole: "
                    "it must be cut along, and its statistics summed over ranks"
                )
        elif norm.main.axes and norm.main.axes[0] == axis and any(s.view == view for s in norm.main.held):
            yield from _follows(norm, out, axis, view, held)


def _module(name: str) -> str:
    """The module that holds the tensor's own: ``model.layers.0.self_attn`` of ``...self_attn.q_proj.weight``."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[0]
