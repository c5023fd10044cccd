"""Which elements of the parameters the run reached: those whose gradient is not exactly zero.

The reference's graph is cut at every point where its tensors are put in place anew, so it never spans
more than one sublayer; there a random cotangent is sent back through it. A matrix that is streamed is
not kept for this: where its gradient is zero follows from where inputs and cotangents are.
"""

from __future__ import annotations

import torch

TRIES = 3  # cotangents that are sent back where gradients have zeros
HELD_POINTS = 32  # points for which a parameter is kept if no gradient reaches it: those of one attention


class Coverage:
    """Counts elements reached, by name of the parameter in the model."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self._reached: dict[str, torch.Tensor | None] = {}  # None: all of it
        self._leaves: list[tuple[str, torch.Tensor, int]] = []
        self._points = 0

    def divide(self, name: str, experts: int) -> None:
        """Count the parameter an expert at a time, under ``name[0]``, ``name[1]``, ..."""
        size = self.sizes.pop(name, None)
        if size is not None:
            self.sizes.update({f"{name}[{expert}]": size // experts for expert in range(experts)})

    def full(self, name: str) -> None:
        """All of the parameter was reached."""
        self._reached[name] = None

    def add(self, name: str, reached: torch.Tensor) -> None:
        """Elements where ``reached`` is true were reached; adds to what was reached before."""
        before = self._reached.get(name, False)
        if before is None:
            return
        reached = reached.cpu()
        if isinstance(before, torch.Tensor):
            reached = reached | before
        self._reached[name] = None if bool(reached.all()) else reached

    def product(self, name: str, x: torch.Tensor, g: torch.Tensor) -> None:
        """A matrix ``[out, in]`` that took ``x [tokens, in]`` to outputs with the cotangent ``g [tokens, out]``."""
        if self._reached.get(name, False) is None:
            return
        there, back = x != 0, g != 0
        if bool(there.all()) and bool(back.any(0).all()):
            self.full(name)
            return
        self.add(name, (back.to(torch.float32).T @ there.to(torch.float32)) > 0)

    def leaf(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Watch a parameter that was made for the model's code; returns it as a leaf of the graph."""
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.detach().requires_grad_()
        if self._reached.get(name, False) is not None:
            self._leaves.append((name, tensor, self._points))
        return tensor

    def backward(self, outputs: list[torch.Tensor], generator: torch.Generator) -> None:
        """Send random cotangents back through the graph, and note which elements they reach."""
        ends = [y for y in outputs if y.requires_grad and y.grad_fn is not None and y.is_floating_point()]
        for _ in range(TRIES if ends else 0):
            cotangents = [
                torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y.device, y.dtype) for y in ends
            ]
            try:
                torch.autograd.backward(ends, cotangents, retain_graph=True)
            except (AssertionError, RuntimeError):  # a model's own backward, of reversible layers say, may refuse
                break  # what it would have reached counts as not reached
            if not self._collect():
                break  # what is missing is rarely so by chance: terms that cancel, in a narrow dtype
        self._points += 1
        self._leaves = [
            (name, tensor, since)
            for name, tensor, since in self._leaves
            if self._reached.get(name, False) is not None and self._points - since < HELD_POINTS
        ]

    def _collect(self) -> bool:
        """Take the gradients that have come; whether one of them has zeros."""
        zeros = False
        for name, tensor, _ in self._leaves:
            if tensor.grad is not None:
                reached = tensor.grad != 0
                zeros |= not bool(reached.all())
                self.add(name, reached)
                tensor.grad = None
        return zeros

    def unreached(self) -> dict[str, int]:
        """Parameters that were not reached in full, with the number of elements that were not."""
        return {name: missed for name in self.sizes if (missed := self.missed(name))}

    def missed(self, name: str) -> int:
        """Elements of the parameter that were not reached."""
        reached = self._reached.get(name, False)
        if reached is None:
            return 0
        return self.sizes[name] - (int(reached.sum()) if isinstance(reached, torch.Tensor) else 0)

    def fraction(self) -> float:
        """The part of all elements that was reached."""
        total = sum(self.sizes.values())
        return 1.0 - sum(self.unreached().values()) / total if total else 1.0
