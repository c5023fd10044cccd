"""Which index of which tensor feeds which input channel of the products at which ranks meet."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .disk import Disk
from .reach import Sum, Trace
from .sums import Meeting


def _few(count: int) -> list[int]:
    return sorted({0, 1, count // 3, count // 2, count - 1} & set(range(count)))


def watched_of(trace: Trace, at: Sum, found: Meeting) -> list[str]:
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


def scanned(
    trace: Trace, disk: Disk, sums: list[Sum], watched: Mapping[Sum, list[str]]
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


def _own_channels(trace: Trace, disk: Disk, at: Sum, out: dict[tuple[str, int], torch.Tensor]) -> None:
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
    disk: Disk,
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
