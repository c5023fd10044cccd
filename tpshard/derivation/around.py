"""What stands around what is cut: tensors along the logits, those added after a sum, those inside a rank's own part."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch

from .disk import Disk
from .probe import Probe
from .products import Product, Products
from .reach import Sum, Trace, traced
from .sums import Meeting, output_head


def of_logits(trace: Trace, disk: Disk) -> dict[str, int]:
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


def inside_of(probe: Probe, disk: Disk, found: Meeting, tensors: Set[str]) -> frozenset[str]:
    """Tensors that are whole, of modules whose outputs what is cut feeds: activations, norms of single heads."""
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


def added_once(probe: Probe, disk: Disk, found: Meeting) -> frozenset[str]:
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
