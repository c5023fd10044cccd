"""Units: channels that share what feeds them belong together, and every index of a tensor gets a label.

What results are units (heads, feed-forward channels, state-space heads), groups of units that share some indices
(query heads over a key-value head), and indices that all units share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

WHOLE = ("whole", 0)
Label = tuple[str, int]


def differs(fed: torch.Tensor) -> bool:
    """Whether there are indices that feed some channels and not others."""
    return bool((fed.any(1) & ~fed.all(1)).any())


def cut_dims(tables: Mapping[tuple[str, int], torch.Tensor]) -> dict[str, int]:
    """The dimension of every tensor that is cut: the one whose indices feed the fewest runs of channels, then channels.

    Heads and the channels of a head may be two dimensions: an index of the one feeds a run, of the other one of each.
    """
    best: dict[str, tuple[tuple[float, float], int]] = {}
    for (name, dim), fed in tables.items():
        if not differs(fed):
            continue
        reached = fed.any(1)
        share = float(fed[reached].double().mean())
        runs = int((fed[:, 1:] & ~fed[:, :-1]).sum() + fed[:, 0].sum())
        key = (runs / int(reached.sum()), share)
        if name not in best or key < best[name][0]:
            best[name] = (key, dim)
    return {name: dim for name, (_, dim) in best.items()}


def run_lengths(fed: torch.Tensor, starts: list[int]) -> set[int]:
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


def components(indices: list[tuple[torch.Tensor, float]], starts: list[int], longest: int) -> torch.Tensor:
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


def groups_of(indices: list[tuple[torch.Tensor, float]], units: torch.Tensor) -> torch.Tensor:
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


def copies(indices: list[tuple[torch.Tensor, float]], units: torch.Tensor) -> float:
    """How many times the bytes along the axis all units hold together; what all of them share is left out."""
    held = total = 0.0
    for fed, weight in indices:
        touched = _touched(fed, units).sum(1).double()
        partial = touched[touched < int(units.max()) + 1]
        held += weight * float(partial.sum())
        total += weight * float((partial > 0).sum())
    return held / total if total else 1.0


def labelled(
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
