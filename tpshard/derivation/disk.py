"""From parameters of the model to tensors on disk: checkpoints are cut there, whatever a model joins on loading."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch

from .probe import Probe


class Disk:
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
