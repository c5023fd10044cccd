"""Where ranks must meet: the products that are cut along what they sum over.

A product can end a block of a tensor-parallel layer where its input channels are fed by different rows of
matrices before it. Of those that could, the ones are taken with which most can be cut; what cannot go
together (the same matrix cut along two dimensions) leaves the smaller one out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import torch

from .patterns import Patterns
from .probe import Probe
from .reach import Sum, Trace, norms, traced

WORTHWHILE = 0.002  # of the parameters: what a norm that must be summed over ranks has to bring
SHARE = 0.25  # of its own size: what a product must cut beside itself


@dataclass
class Candidate:
    """A product that could end a block.

    ``cut``: by parameter the dimensions along which its channels differ; ``sizes``: and how many elements that are.
    """

    at: Sum
    cut: dict[str, frozenset[int]]
    sizes: dict[str, float]

    @property
    def size(self) -> float:
        return sum(self.sizes.values())


@dataclass
class Meeting:
    """Where ranks meet: products, norms that span what is cut, and what share of the parameters is cut so."""

    sums: frozenset[Sum] = frozenset()
    spanning: frozenset[str] = frozenset()
    cut: dict[str, float] = field(default_factory=dict)  # elements by parameter
    dims: dict[str, frozenset[int]] = field(default_factory=dict)  # and along which dimensions, numbers left out

    @property
    def total(self) -> float:
        return sum(self.cut.values())


def meeting(probe: Probe) -> Meeting:
    """The products and norms at which the ranks of this model meet.

    A norm is taken for one that spans what is cut only where more can be cut beside all that is cut without it.
    """
    found = _settled(probe, Meeting())
    tables = set(traced(probe).tables)
    every = sum(value.numel() for name, value in probe.parameters.items() if name not in tables)
    if found.total >= (1 - WORTHWHILE) * every:
        return found
    for paths in probe.patterns.sorted(norms(probe)).values():
        tried = _settled(probe, replace(found, spanning=found.spanning | frozenset(paths)))
        if tried.total > found.total + WORTHWHILE * every:
            found = tried
    return found


def _settled(probe: Probe, found: Meeting) -> Meeting:
    """``found`` with more sums, until another look with them in place finds no more."""
    for _ in range(4):
        trace = traced(probe, found.sums, found.spanning)
        chosen, found = _chosen(candidates(trace), found, probe.patterns)
        alike = {at for at in trace.seen if any(_alike(at, one.at, probe.patterns) for one in chosen)}
        more = frozenset(alike) - found.sums
        if not more:
            break
        found = replace(found, sums=found.sums | more)
    return found


def _alike(a: Sum, b: Sum, patterns: Patterns) -> bool:
    return a.contracted == b.contracted and patterns.of(a.parameter) == patterns.of(b.parameter)


def _kind(at: Sum, probe: Probe) -> object:
    """A parameter's name with what else its layer holds: the same name in another kind of layer is another."""
    layer, of = layer_of(at.parameter), probe.patterns.of
    return of(at.parameter), frozenset(of(n) for n in probe.parameters if n.startswith(layer))


def layer_of(name: str) -> str:
    """What the names of a layer's parameters begin with; "" for a name that is of none."""
    first = re.search(r"\.\d+\.", name)
    return name[: first.end()] if first else ""


def candidates(trace: Trace) -> list[Candidate]:
    """The products that could end a block, the last one of each name and kind of layer."""
    out = []
    groups: dict[tuple[object, tuple[int, ...]], Sum] = {}
    for at in trace.seen:
        groups[_kind(at, trace.probe), at.contracted] = at
    head = output_head(trace.probe)
    watchable = [name for name in trace.probe.parameters if name not in trace.tables]
    for at in groups.values():
        count = trace.channels(at)
        if count < 2 or at.parameter in trace.tables or at.parameter == head:
            continue
        few = sorted({0, count // 2, count - 1})
        watched = [name for name in watchable if layer_of(name) in ("", layer_of(at.parameter))]  # its block is there
        feeds = [trace.feeding([(at, channel)], watched) for channel in few]
        own = trace.probe.parameters[at.parameter].numel()
        one = Candidate(at, {at.parameter: frozenset(at.contracted)}, {at.parameter: own})
        matrices = 0
        for name in {name for feed in feeds for name in feed}:
            if name == at.parameter:
                continue
            masks = [feed.get(name) for feed in feeds]
            share, dims = _differing(masks, trace.probe.parameters[name].shape)
            if dims:
                size = share * trace.probe.parameters[name].numel()
                one.cut[name], one.sizes[name] = dims, size
                matrices += size if sum(n > 1 for n in trace.probe.parameters[name].shape) > 1 else 0
        if matrices >= SHARE * own:
            out.append(one)
    return out


def _differing(masks: list[torch.Tensor | None], shape: torch.Size) -> tuple[float, frozenset[int]]:
    """The largest share of a dimension's indices that do not feed all channels, and the dimensions that have some."""
    best, dims = 0.0, set()
    for dim in range(len(shape)):
        others = [d for d in range(len(shape)) if d != dim]
        sets = [torch.zeros(shape[dim], dtype=torch.bool) if m is None else _any(m, others) for m in masks]
        if all(torch.equal(sets[0], one) for one in sets[1:]):
            continue
        share = 1 - float(torch.stack(sets).all(0).double().mean())
        dims.add(dim)
        best = max(best, share)
    return best, frozenset(dims)


def _any(mask: torch.Tensor, dims: list[int]) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        mask = mask.any(dim)
    return mask


def _chosen(found: list[Candidate], known: Meeting, patterns: Patterns) -> tuple[list[Candidate], Meeting]:
    """The largest candidates that agree with each other, and with what is known, about the dimension of every matrix.

    The same matrix of another layer counts as the same.
    """
    cut, taken = dict(known.cut), dict(known.dims)
    chosen = []
    for one in sorted(found, key=lambda c: c.size, reverse=True):
        with_it = dict(taken)
        for name, dims in one.cut.items():
            key = patterns.of(name)
            with_it[key] = with_it.get(key, dims) & dims
        if not all(with_it.values()):
            continue
        taken = with_it
        chosen.append(one)
        for name, size in one.sizes.items():
            cut[name] = max(cut.get(name, 0.0), size)
    return chosen, replace(known, cut=cut, dims=taken)


def output_head(probe: Probe) -> str:
    """The parameter that gives the logits; "" where the model has none."""
    module = probe.model.get_output_embeddings() if hasattr(probe.model, "get_output_embeddings") else None
    weight = getattr(module, "weight", None)
    return next((name for name, value in probe.parameters.items() if value is weight), "")
