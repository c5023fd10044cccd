"""Units and segments: which index of which tensor belongs to which unit of which axis.

The input channels of the products at which ranks meet are the finest that can be dealt. Channels that are
fed by the same index belong together; what results are units (heads, feed-forward channels, state-space
heads), groups of units that share some indices (query heads over a key-value head), and indices that all
units share. Every index of a tensor along its cut dimension gets a label, and the labels, in stored
order, are what a fusion is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch

from .probe import Probe
from .products import Product, Products
from .reach import Sum, Trace, traced, unnumbered
from .sums import Meeting, output_head

MOST_COPIES = 3.0  # times the bytes of an axis that all its units may hold together, where units share some

WHOLE = ("whole", 0)
Label = tuple[str, int]


@dataclass
class AxisFound:
    """An axis: the products along it, how many units, and how many groups of units that share indices.

    ``tensors``: by name on disk the cut dimension and a label for each index: ``("unit", n)``, ``("group", n)``,
    or ``("whole", 0)``. ``ends``: those of the tensors that are summed over. ``channels``: the unit of every channel
    of each product, ``group_of``: the group of every unit.
    """

    sums: frozenset[str]
    units: int
    groups: int
    tensors: dict[str, tuple[int, tuple[Label, ...]]] = field(default_factory=dict)
    ends: frozenset[str] = frozenset()
    channels: dict[Sum, tuple[int, ...]] = field(default_factory=dict)
    group_of: tuple[int, ...] = ()


@dataclass
class Structure:
    """All that was found of one model; names are those on disk."""

    axes: list[AxisFound]
    vocabulary: dict[str, int]  # dimension along the vocabulary of tensors that give the logits
    tables: dict[str, int]  # rows of the tables that ids are looked up in
    once: frozenset[str]  # added after a sum over ranks
    spanning: frozenset[str]  # norms that need a sum over ranks
    inside: frozenset[str]  # whole, in modules whose outputs are a rank's own share
    odd: dict[str, str]  # tensors that were left whole, and why
    silent: bool  # whether some index of what is cut fed nothing: its unit may have been off for all tokens


class _Disk:
    """From parameters to tensors on disk."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.parts: dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        starts = torch.tensor(list(probe.offsets.values()))
        names = list(probe.offsets)
        for parameter, origin in probe.origin.items():
            flat = origin.flatten()
            owner = torch.bucketize(flat, starts, right=True) - 1
            self.parts[parameter] = [
                (names[n], places, flat[places] - starts[n])
                for n in owner.unique().tolist()
                for places in [(owner == n).nonzero().flatten()]
            ]

    def masks(self, parameter: str, mask: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """A mask of a parameter as masks of its tensors on disk; ``mask`` may have further dimensions in front."""
        shape = self.probe.parameters[parameter].shape
        front = mask.shape[: mask.dim() - len(shape)]
        if len(self.parts.get(parameter, ())) == 1:  # as stored, which is usual
            name, places, at = self.parts[parameter][0]
            if shape == self.probe.shapes[name] and torch.equal(places, at):
                yield name, mask
                return
        flat = mask.reshape(*front, -1)
        for name, places, at in self.parts.get(parameter, ()):
            here = torch.zeros((*front, prod(self.probe.shapes[name])), dtype=torch.bool)
            here[..., at] = flat[..., places]
            yield name, here.view(*front, *self.probe.shapes[name])


def structure(probe: Probe, found: Meeting) -> Structure:
    """Look at every channel of every product at which ranks meet."""
    trace = traced(probe, found.sums, found.spanning)
    disk = _Disk(probe)
    sums = sorted(at for at in found.sums if at in trace.seen)
    watched = {at: _watched(trace, at, found) for at in sums}
    shares = _scanned(trace, disk, sums, watched)
    axes: list[AxisFound] = []
    odd: dict[str, str] = {}
    for group in _together(sums, shares):
        axis, left = _axis(probe, disk, trace, group, shares)
        odd |= left
        if axis is not None:
            axes.append(axis)
    tables = {
        name: probe.shapes[name][0]
        for table in trace.tables
        for name, _, _ in disk.parts[table]
        if len(probe.shapes[name]) == 2
    }
    spanning = frozenset(
        name
        for path in found.spanning
        for parameter in probe.parameters
        if parameter.rpartition(".")[0] == path
        for name, _, _ in disk.parts[parameter]
    )
    once, inside = _once(probe, disk, found), _inside(probe, disk, found, axes)
    return Structure(axes, _of_logits(trace, disk), tables, once, spanning, inside, odd, _silent(shares))


def _few(count: int) -> list[int]:
    return sorted({0, 1, count // 3, count // 2, count - 1} & set(range(count)))


def _watched(trace: Trace, at: Sum, found: Meeting) -> list[str]:
    """Parameters whose elements feed some channels of a product and not others."""
    names = [name for name in trace.probe.parameters if name not in trace.tables]
    feeds = [trace.feeding([(at, channel)], names) for channel in _few(trace.channels(at))]
    out = []
    for name in dict.fromkeys(name for feed in feeds for name in feed):
        if name == at.parameter:
            continue
        first = feeds[0].get(name)
        if any((m := feed.get(name)) is None or first is None or not torch.equal(m, first) for feed in feeds):
            out.append(name)
    return out


def _scanned(
    trace: Trace, disk: _Disk, sums: list[Sum], watched: Mapping[Sum, list[str]]
) -> dict[Sum, dict[tuple[str, int], torch.Tensor]]:
    """For every product, tensor and dimension: which index feeds which channel ``[indices, channels]``."""
    shapes = trace.probe.shapes
    out: dict[Sum, dict[tuple[str, int], torch.Tensor]] = {at: {} for at in sums}

    def note(at: Sum, channels: range, parameter: str, masks: torch.Tensor) -> None:
        for name, here in disk.masks(parameter, masks):
            for dim, length in enumerate(shapes[name]):
                table = out[at].get((name, dim))
                if table is None:
                    table = out[at][name, dim] = torch.zeros((length, trace.channels(at)), dtype=torch.bool)
                others = [d + 1 for d in range(len(shapes[name])) if d != dim]
                table[:, channels.start : channels.stop] |= (here.any(others) if others else here).T

    told = {at for batch in _batches(sums, watched) for at in _coded(trace, disk, batch, watched, out)}
    for batch in _batches([at for at in sums if at not in told], watched):
        names = sorted({name for at in batch for name in watched[at]})
        for channels, fed in trace.feeding_each(batch, names):
            for at in batch:
                own = range(channels.start, min(channels.stop, trace.channels(at)))
                for name in watched[at] if own else ():
                    if name in fed:
                        note(at, own, name, fed[name][: len(own)])
    for at in sums:
        _own_channels(trace, disk, at, out[at])
    return out


def _own_channels(trace: Trace, disk: _Disk, at: Sum, out: dict[tuple[str, int], torch.Tensor]) -> None:
    """Which index of the product's own tensors belongs to which channel."""
    shape = trace.probe.parameters[at.parameter].shape
    channel = torch.zeros(shape, dtype=torch.long)
    for dim in at.contracted:
        along = torch.arange(shape[dim]).view(-1, *[1] * (len(shape) - dim - 1))
        channel = channel * shape[dim] + along
    flat = channel.flatten()
    for name, places, where in disk.parts[at.parameter]:
        for dim, index in enumerate(torch.unravel_index(where, trace.probe.shapes[name])):
            table = out.setdefault(
                (name, dim), torch.zeros((trace.probe.shapes[name][dim], trace.channels(at)), dtype=torch.bool)
            )
            table[index, flat[places]] = True


def _coded(
    trace: Trace,
    disk: _Disk,
    batch: list[Sum],
    watched: Mapping[Sum, list[str]],
    out: dict[Sum, dict[tuple[str, int], torch.Tensor]],
) -> list[Sum]:
    """The products of which each index feeds one channel: which one, told bit by bit of the channel's number.

    An index that feeds two channels feeds both a channel with a bit set and one without, for some bit. Products
    with such an index are left for a look at every channel by itself.
    """
    names = sorted({name for at in batch for name in watched[at]})
    bits = max(trace.channels(at) - 1 for at in batch).bit_length()
    sides: list[dict[Sum, dict[tuple[str, int], torch.Tensor]]] = []
    for bit in range(bits):
        for side in (0, 1):
            chosen = {at: ((torch.arange(trace.channels(at)) >> bit) & 1) == side for at in batch}
            fed = trace.feeding_any(chosen, names)
            found: dict[Sum, dict[tuple[str, int], torch.Tensor]] = {at: {} for at in batch}
            for at in batch:
                for parameter in watched[at]:
                    for name, here in disk.masks(parameter, fed[parameter]) if parameter in fed else ():
                        for dim in range(here.dim()):
                            others = [d for d in range(here.dim()) if d != dim]
                            reached = here.any(others) if others else here
                            known = found[at].get((name, dim))
                            found[at][name, dim] = reached if known is None else known | reached
            sides.append(found)
    return [at for at in batch if _told(trace, at, [one[at] for one in sides], out[at])]


def _told(
    trace: Trace,
    at: Sum,
    sides: list[dict[tuple[str, int], torch.Tensor]],
    out: dict[tuple[str, int], torch.Tensor],
) -> bool:
    """Note the channel of each index, if every tensor has one dimension whose indices feed one channel each."""
    count, shapes = trace.channels(at), trace.probe.shapes
    tables: dict[tuple[str, int], torch.Tensor] = {}
    for name in {name for side in sides for name, _ in side}:
        if not any(bool(fed.any()) for side in sides for (own, _), fed in side.items() if own == name):
            # an expert that no token went to: it says nothing of the others
            tables |= {(name, dim): torch.zeros((n, count), dtype=torch.bool) for dim, n in enumerate(shapes[name])}
            continue
        cut = None
        for dim, length in enumerate(shapes[name]):
            none = torch.zeros(length, dtype=torch.bool)
            zeros, ones = ([side.get((name, dim), none) for side in sides[first::2]] for first in (0, 1))
            reached = torch.stack([*zeros, *ones]).any(0)
            if not reached.any() or any(bool((a & b).any()) for a, b in zip(zeros, ones, strict=True)):
                continue
            channel = sum(b.long() << bit for bit, b in enumerate(ones))
            table = torch.zeros((length, count), dtype=torch.bool)
            table[reached.nonzero().flatten(), channel[reached]] = True
            cut, tables[name, dim] = dim, table
            break
        if cut is None:
            return False
        for dim, length in enumerate(shapes[name]):
            if dim != cut:
                tables[name, dim] = torch.ones((length, count), dtype=torch.bool)
    out.update(tables)
    return True


def _batches(sums: list[Sum], watched: Mapping[Sum, list[str]]) -> list[list[Sum]]:
    """Products that are fed by different parameters are looked at in one go."""
    batches: list[tuple[list[Sum], set[str]]] = []
    for at in sums:
        for batch, names in batches:
            if not names & set(watched[at]):
                batch.append(at)
                names |= set(watched[at])
                break
        else:
            batches.append(([at], set(watched[at])))
    return [batch for batch, _ in batches]


def _together(sums: list[Sum], shares: Mapping[Sum, Mapping[tuple[str, int], torch.Tensor]]) -> list[list[Sum]]:
    """Products that cut one tensor: their channels belong to one axis."""
    groups: list[tuple[list[Sum], set[str]]] = []
    for at in sums:
        names = {name for (name, _), fed in shares[at].items() if _differs(fed)}
        joined = [group for group in groups if group[1] & names]
        groups = [group for group in groups if group not in joined]
        groups.append(([s for group in joined for s in group[0]] + [at], names.union(*(g[1] for g in joined))))
    return [group for group, _ in groups]


def _differs(fed: torch.Tensor) -> bool:
    """Whether there are indices that feed some channels and not others."""
    return bool((fed.any(1) & ~fed.all(1)).any())


def _silent(shares: Mapping[Sum, Mapping[tuple[str, int], torch.Tensor]]) -> bool:
    fed = [table for tables in shares.values() for table in tables.values() if _differs(table) or not table.any()]
    return any(not bool(table.any(1).all()) for table in fed)


def _axis(
    probe: Probe,
    disk: _Disk,
    trace: Trace,
    sums: list[Sum],
    shares: Mapping[Sum, Mapping[tuple[str, int], torch.Tensor]],
) -> tuple[AxisFound | None, dict[str, str]]:
    counts = [trace.channels(at) for at in sums]
    every: dict[tuple[str, int], list[torch.Tensor | None]] = {}
    for n, at in enumerate(sums):
        for key, fed in shares[at].items():
            every.setdefault(key, [None] * len(sums))[n] = fed
    tables = {}
    for (name, dim), parts in every.items():
        length = probe.shapes[name][dim]
        tables[name, dim] = torch.cat(
            [
                torch.zeros((length, c), dtype=torch.bool) if p is None else p
                for p, c in zip(parts, counts, strict=True)
            ],
            1,
        )
    dims = _cut_dims(tables)
    ends = frozenset(name for at in sums for name, _, _ in disk.parts[at.parameter])
    starts = [sum(counts[:n]) for n in range(len(counts))]
    alike: dict[bytes, tuple[torch.Tensor, float]] = {}  # tensors of many experts are cut alike
    for name, dim in dims.items():
        key = tables[name, dim].numpy().tobytes()
        fed, before = alike.get(key, (tables[name, dim], 0.0))
        alike[key] = fed, before + _weight(probe.shapes[name], dim)
    indices = list(alike.values())
    chosen: tuple[torch.Tensor, torch.Tensor, dict[str, tuple[int, tuple[Label, ...]]], dict[str, str]] | None = None
    for longest in sorted({length for fed, _ in indices for length in _run_lengths(fed, starts)}):
        units = _components(indices, starts, longest)
        if int(units.max()) < 1 or _copies(indices, units) > MOST_COPIES:
            continue
        groups = _groups(indices, units)
        found, odd = _labelled(dims, tables, units, groups)
        if chosen is None or len(odd) < len(chosen[3]):
            chosen = units, groups, found, odd
        if not odd:
            break
    if chosen is None:
        return None, dict.fromkeys(ends, "all its channels hang together")
    units, groups, found, odd = chosen
    sums_found = frozenset(unnumbered(at.parameter) for at in sums)
    channels = {
        at: tuple(units[start : start + count].tolist()) for at, start, count in zip(sums, starts, counts, strict=True)
    }
    axis = AxisFound(
        sums_found, int(units.max()) + 1, int(groups.max()) + 1, found, ends, channels, tuple(groups.tolist())
    )
    return axis, odd


def _weight(shape: tuple[int, ...], dim: int) -> float:
    return float(torch.tensor(shape).prod()) / shape[dim]


def _cut_dims(tables: Mapping[tuple[str, int], torch.Tensor]) -> dict[str, int]:
    """The dimension of every tensor that is cut: the one whose indices feed the fewest runs of channels, then channels.

    Heads and the channels of a head may be two dimensions: an index of the one feeds a run, of the other one of each.
    """
    best: dict[str, tuple[tuple[float, float], int]] = {}
    for (name, dim), fed in tables.items():
        if not _differs(fed):
            continue
        reached = fed.any(1)
        share = float(fed[reached].double().mean())
        runs = int((fed[:, 1:] & ~fed[:, :-1]).sum() + fed[:, 0].sum())
        key = (runs / int(reached.sum()), share)
        if name not in best or key < best[name][0]:
            best[name] = (key, dim)
    return {name: dim for name, (_, dim) in best.items()}


def _run_lengths(fed: torch.Tensor, starts: list[int]) -> set[int]:
    return {stop - start for row in fed.unique(dim=0) if not bool(row.all()) for start, stop in _runs(row, starts)}


def _runs(row: torch.Tensor, starts: list[int]) -> list[tuple[int, int]]:
    places = row.nonzero().flatten().tolist()
    out: list[tuple[int, int]] = []
    for place in places:
        if out and out[-1][1] == place and place not in starts:
            out[-1] = (out[-1][0], place + 1)
        else:
            out.append((place, place + 1))
    return out


def _components(indices: list[tuple[torch.Tensor, float]], starts: list[int], longest: int) -> torch.Tensor:
    """A number for every channel, the same for those that belong together, in the order of the channels.

    Channels side by side in runs of at most ``longest`` are held together by an index that they share, channels of
    different products by one that has one run in each.
    """
    channels = indices[0][0].shape[1]
    bounds = [*starts, channels]
    joined = _Joined(channels)
    for fed, _ in indices:
        for row in fed.unique(dim=0):
            touched = [row[a:b] for a, b in pairwise(bounds)]
            if any(bool(part.all()) for part in touched if len(part) > 1):
                continue  # shared by all
            runs = _runs(row, starts)
            fitting = [run for run in runs if run[1] - run[0] <= longest]
            for start, stop in fitting:
                joined.join(range(start, stop))
            if len(fitting) == len(runs) == sum(bool(part.any()) for part in touched):
                joined.join(start for start, _ in runs)
    return joined.numbers()


def _groups(indices: list[tuple[torch.Tensor, float]], units: torch.Tensor) -> torch.Tensor:
    """A number for every unit, the same for those that share an index which not all of them share."""
    count = int(units.max()) + 1
    joined = _Joined(count)
    for fed, _ in indices:
        for row in _touched(fed, units).unique(dim=0):
            if not bool(row.all()):
                joined.join(row.nonzero().flatten().tolist())
    return joined.numbers()


class _Joined:
    """Numbers from 0 that are joined to sets."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def join(self, numbers: Iterable[int]) -> None:
        first: int | None = None
        for number in numbers:
            if first is None:
                first = self._root(number)
            else:
                self._parent[self._root(number)] = first

    def numbers(self) -> torch.Tensor:
        """For each the number of its set, counted in the order of their first members."""
        seen: dict[int, int] = {}
        return torch.tensor([seen.setdefault(self._root(n), len(seen)) for n in range(len(self._parent))])


def _touched(fed: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """Which index feeds which unit, ``[indices, units]``."""
    members = torch.nn.functional.one_hot(units, int(units.max()) + 1)
    return fed.float() @ members.float() > 0


def _copies(indices: list[tuple[torch.Tensor, float]], units: torch.Tensor) -> float:
    """How many times the bytes along the axis all units hold together; what all of them share is left out."""
    held = total = 0.0
    for fed, weight in indices:
        touched = _touched(fed, units).sum(1).double()
        partial = touched[touched < int(units.max()) + 1]
        held += weight * float(partial.sum())
        total += weight * float((partial > 0).sum())
    return held / total if total else 1.0


def _labelled(
    dims: Mapping[str, int],
    tables: Mapping[tuple[str, int], torch.Tensor],
    units: torch.Tensor,
    groups: torch.Tensor,
) -> tuple[dict[str, tuple[int, tuple[Label, ...]]], dict[str, str]]:
    """A label for every index of the cut dimensions, and the tensors for which there is none."""
    count = int(units.max()) + 1
    of_group = {frozenset((groups == g).nonzero().flatten().tolist()): g for g in range(int(groups.max()) + 1)}
    known: dict[bytes, tuple[Label, ...] | None] = {}
    found, odd = {}, {}
    for name, dim in dims.items():
        key = tables[name, dim].numpy().tobytes()
        if key not in known:
            known[key] = _labels(_touched(tables[name, dim], units), count, of_group)
        labels = known[key]
        if labels is None:
            odd[name] = f"its indices along dimension {dim} are shared by units that form no group"
        elif any(label != WHOLE for label in labels):
            found[name] = (dim, labels)
    return found, odd


def _labels(touched: torch.Tensor, count: int, of_group: Mapping[frozenset[int], int]) -> tuple[Label, ...] | None:
    """A label for every index, from the units that it feeds; None where one feeds units that form no group."""
    labels: list[Label] = []
    for row in touched:
        held = frozenset(row.nonzero().flatten().tolist())
        if not held or len(held) == count:
            labels.append(WHOLE)
        elif len(held) == 1:
            labels.append(("unit", next(iter(held))))
        elif held in of_group:
            labels.append(("group", of_group[held]))
        else:
            return None
    return tuple(labels)


def _of_logits(trace: Trace, disk: _Disk) -> dict[str, int]:
    """Tensors with one index for each of the logits, and their dimension."""
    count = int(trace.outputs.shape[-1])
    names = [n for n in trace.probe.parameters if n not in trace.tables or n == output_head(trace.probe)]
    out: dict[str, int] | None = None
    for channel in (0, count // 2, count - 1):
        here: dict[str, int] = {}
        for parameter, mask in trace.feeding_output(channel, names).items():
            for name, found in disk.masks(parameter, mask):
                for dim, length in enumerate(found.shape):
                    others = [d for d in range(found.dim()) if d != dim]
                    reached = found.any(others) if others else found
                    if length == count and int(reached.sum()) == 1 and bool(reached[channel]):
                        here[name] = dim
        out = here if out is None else {name: dim for name, dim in out.items() if here.get(name) == dim}
    return out or {}


def _inside(probe: Probe, disk: _Disk, found: Meeting, axes: list[AxisFound]) -> frozenset[str]:
    """Tensors that are whole, of modules whose outputs what is cut feeds: activations, norms of single heads."""
    tensors = {name for axis in axes for name in axis.tensors}
    cut = [p for p, parts in disk.parts.items() if any(name in tensors for name, _, _ in parts)]
    if not cut:
        return frozenset()
    paths = {p.rpartition(".")[0] for p in disk.parts if p not in cut} - {p.rpartition(".")[0] for p in cut}
    outputs: dict[str, torch.Tensor] = {}

    def hook(path: str) -> Any:
        def after(module: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if torch.is_tensor(first) and first.requires_grad:
                outputs[path] = first

        return after

    handles = [probe.modules[path].register_forward_hook(hook(path)) for path in paths]
    try:
        traced(probe, found.sums, found.spanning)
    finally:
        for handle in handles:
            handle.remove()
    inside: set[str] = set()
    for path, value in outputs.items():
        fed = torch.autograd.grad(
            value.sum(), [probe.parameters[name] for name in cut], retain_graph=True, allow_unused=True
        )
        if any(gradient is not None and bool((gradient != 0).any()) for gradient in fed):
            inside |= {name for p, parts in disk.parts.items() if p.rpartition(".")[0] == path for name, _, _ in parts}
    return frozenset(inside)


def _once(probe: Probe, disk: _Disk, found: Meeting) -> frozenset[str]:
    """Tensors that are added to a sum: with the products' own part zero they still feed what their module gives."""
    paths = {at.parameter.rpartition(".")[0] for at in found.sums}
    outputs: dict[str, torch.Tensor] = {}

    def hook(path: str) -> Any:
        def after(module: Any, args: Any, output: Any) -> None:
            outputs[path] = output[0] if isinstance(output, tuple) else output

        return after

    handles = [probe.modules[path].register_forward_hook(hook(path)) for path in paths]

    def product(one: Product, again: Callable[[torch.Tensor], torch.Tensor], result: torch.Tensor) -> Any:
        if Sum(one.parameter, one.contracted) in found.sums:
            return again(torch.zeros_like(one.x))
        return None

    try:
        with torch.enable_grad(), Products(probe.parameters, product, lambda table, result: result.detach()):
            probe.run()
    finally:
        for handle in handles:
            handle.remove()
    once: set[str] = set()
    for path, value in outputs.items():
        own = [name for name in probe.parameters if name.rpartition(".")[0] == path]
        if not value.requires_grad:
            continue
        fed = torch.autograd.grad(
            value.sum(), [probe.parameters[name] for name in own], retain_graph=True, allow_unused=True
        )
        for name, gradient in zip(own, fed, strict=True):
            if gradient is not None and bool((gradient != 0).any()):
                once |= {tensor for tensor, _, _ in disk.parts[name]}
    return frozenset(once)
