"""What feeds what: the parameters that reach each input channel of a product, exactly.

A channel's gradient is zero, to the last bit, where a parameter's element does not feed it: products with
zero are zero. A few random tokens make the opposite sure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from tpshard.errors import UnsupportedError

from .probe import Probe
from .products import Lookup, Product, Products

AT_ONCE = 1 << 22  # elements of gradients that are held at a time


class Sum(NamedTuple):
    """A product by its parameter, and the dimensions of the parameter that it sums over."""

    parameter: str
    contracted: tuple[int, ...]


@dataclass
class Trace:
    """One run of the model: for each product its activations, one for every time it was computed."""

    probe: Probe
    seen: dict[Sum, list[torch.Tensor]]
    tables: list[str]
    outputs: torch.Tensor
    _totals: dict[Sum, torch.Tensor] = field(default_factory=dict)

    def channels(self, at: Sum) -> int:
        return int(self.seen[at][0].shape[-1])

    def feeding(self, seeds: Iterable[tuple[Sum, int]], watched: Sequence[str]) -> dict[str, torch.Tensor]:
        """Which elements of the ``watched`` parameters feed any of the (product, channel) pairs.

        Parameters that feed none are left out.
        """
        sums = [self._sums(at)[channel] for at, channel in seeds if self._sums(at).requires_grad]
        if not sums:
            return {}
        parameters = [self.probe.parameters[name] for name in watched]
        found = torch.autograd.grad(sum(sums[1:], sums[0]), parameters, retain_graph=True, allow_unused=True)
        return {name: g != 0 for name, g in zip(watched, found, strict=True) if g is not None}

    def feeding_each(
        self, sums: Sequence[Sum], watched: Sequence[str]
    ) -> Iterator[tuple[range, dict[str, torch.Tensor]]]:
        """For every channel what feeds it in any of the products; products with fewer channels have no more.

        Gives some channels at a time: masks are ``[channels, *parameter]``.
        """
        count = max(self.channels(at) for at in sums)
        parameters = [self.probe.parameters[name] for name in watched]
        total = torch.zeros(count, dtype=torch.float64)
        for at in sums:
            total = total + torch.nn.functional.pad(self._sums(at), (0, count - self.channels(at)))
        if not total.requires_grad or not parameters:
            return
        step = max(1, min(count, AT_ONCE // sum(p.numel() for p in parameters)))
        chosen = torch.eye(count, dtype=torch.float64)
        for start in range(0, count, step):
            channels = range(start, min(start + step, count))
            found = _gradients(total, parameters, chosen[channels.start : channels.stop])
            yield channels, {name: g != 0 for name, g in zip(watched, found, strict=True) if g is not None}

    def feeding_any(self, chosen: Mapping[Sum, torch.Tensor], watched: Sequence[str]) -> dict[str, torch.Tensor]:
        """Which elements feed any of the channels that are chosen of each product (a mask of its channels)."""
        total = sum((self._sums(at) * mask).sum() for at, mask in chosen.items())
        if not torch.is_tensor(total) or not total.requires_grad:
            return {}
        parameters = [self.probe.parameters[name] for name in watched]
        found = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        return {name: g != 0 for name, g in zip(watched, found, strict=True) if g is not None}

    def _sums(self, at: Sum) -> torch.Tensor:
        """A random sum over the tokens for every channel, ``[channels]``."""
        known = self._totals.get(at)
        if known is None:
            known = torch.zeros(self.channels(at), dtype=torch.float64)
            for x in self.seen[at]:
                flat = x.reshape(-1, x.shape[-1]).double()
                known = known + (flat * _weights(flat.shape[0])[:, None]).sum(0)
            self._totals[at] = known
        return known

    def feeding_output(self, channel: int, watched: Sequence[str]) -> dict[str, torch.Tensor]:
        """Which elements of the ``watched`` parameters feed one channel of the model's outputs."""
        if not self.outputs.requires_grad:
            return {}
        value = self.outputs[..., channel]
        total = (value * _weights(value.numel()).view(value.shape)).sum()
        parameters = [self.probe.parameters[name] for name in watched]
        found = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        return {name: g != 0 for name, g in zip(watched, found, strict=True) if g is not None}


def _gradients(total: torch.Tensor, parameters: Sequence[torch.Tensor], chosen: torch.Tensor) -> list[Any]:
    """The gradients of some sums of ``total``, one in each row of ``chosen``: ``[rows, *parameter]``, or None."""
    try:
        return list(
            torch.autograd.grad(total, parameters, chosen, retain_graph=True, allow_unused=True, is_grads_batched=True)
        )
    except RuntimeError:  # an operator that cannot take several at a time
        rows = [
            torch.autograd.grad(total, parameters, row, retain_graph=True, allow_unused=True) for row in chosen
        ]  # fmt: skip
        return [None if all(g is None for g in own) else torch.stack(own) for own in zip(*rows, strict=True)]


def _weights(count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64) + 0.5


def traced(probe: Probe, sums: frozenset[Sum] = frozenset(), spanning: frozenset[str] = frozenset()) -> Trace:
    """Run the model once.

    Args:
        sums: products after which ranks meet: what follows has their results whole, so nothing reaches back.
        spanning: paths of norms whose statistics are summed over ranks: each of their channels then depends on its
            own input alone.
    """
    seen: dict[Sum, list[torch.Tensor]] = {}
    tables: list[str] = []

    def product(found: Product, again: Callable[[torch.Tensor], torch.Tensor], result: torch.Tensor) -> Any:
        at = Sum(found.parameter, found.contracted)
        seen.setdefault(at, []).append(found.x)
        return result.detach() if at in sums else None

    def looked_up(found: Lookup, result: torch.Tensor) -> torch.Tensor:
        tables.append(found.parameter)
        return result.detach()

    handles = [probe.modules[path].register_forward_hook(_spans, with_kwargs=True) for path in spanning]
    try:
        with torch.enable_grad(), Products(probe.parameters, product, looked_up):
            outputs = probe.run()
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise UnsupportedError(f"{type(probe.model).__name__} multiplies by none of its parameters when it runs")
    return Trace(probe, seen, list(dict.fromkeys(tables)), outputs)


class _Elementwise(torch.autograd.Function):
    """``y`` as if it depended on each input, and on each vector of weights, channel by channel."""

    @staticmethod
    def forward(context: Any, y: torch.Tensor, count: int, *inputs: torch.Tensor) -> torch.Tensor:
        context.count, context.shapes = count, [value.shape for value in inputs]
        return y.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        flat = gradient.reshape(-1, gradient.shape[-1]).abs().sum(0)
        given = [gradient.abs() if n < context.count else flat.view(shape) for n, shape in enumerate(context.shapes)]
        return (None, None, *given)


def _spans(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    inputs = [v for v in (*args, *kwargs.values()) if torch.is_tensor(v) and v.shape == output.shape]
    own = [p for p in module.parameters() if p.numel() == output.shape[-1]]
    return _Elementwise.apply(output.detach(), len(inputs), *inputs, *own)


def norms(probe: Probe) -> list[str]:
    """Paths of the modules that norm a vector: one weight a channel, no matrix."""
    out = []
    for path, module in probe.modules.items():
        named = re.search("norm", type(module).__name__ + "." + path.rpartition(".")[2], re.IGNORECASE)
        held = list(module.parameters())
        if named and held and all(p.dim() == 1 and p.numel() > 1 for p in held):
            out.append(path)
    return out
