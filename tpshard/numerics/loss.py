"""A loss to send gradients through a model with, and the inputs for it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from .arguments import arguments_of, in_dtype
from .participant import Casts
from .results import results_of
from .skeleton import Skeleton


class Loss:
    """Cross entropy with random labels where a model gives logits, else a random weighting of the hidden states."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, outputs: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed + 2)
        found = results_of(outputs)
        if not found.are_logits:
            hidden = found.main
            weights = torch.randn(hidden.shape, generator=generator, dtype=torch.float32).to(hidden)
            pooled = getattr(outputs, "pooler_output", None)
            loss = (hidden * weights).sum() / hidden.shape[-1]
            return loss if pooled is None else loss + pooled.square().mean()
        logits = found.main
        labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=generator).to(logits.device)
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Sequences:
    """Random content for ``rows`` sequences of ``tokens`` tokens."""

    def __init__(self, rows: int, tokens: int, seed: int) -> None:
        self.rows, self.tokens, self.seed = rows, tokens, seed

    def ids(self, vocabulary: int, name: str = "ids") -> torch.Tensor:
        """Token ids ``[rows, tokens]``."""
        return torch.randint(0, vocabulary, (self.rows, self.tokens), generator=self._generator(name))

    def values(self, name: str, *shape: int) -> torch.Tensor:
        """Gaussian numbers ``[rows, *shape]``."""
        return torch.randn(self.rows, *shape, generator=self._generator(name), dtype=torch.float32)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed if name == "ids" else self.seed ^ zlib.crc32(name.encode()))


def inputs_for(skeleton: Skeleton, sequences: int, tokens: int, seed: int) -> dict[str, Any]:
    """Random content for so many sequences, with a mask of ones, as the model's forward takes it."""
    inputs = arguments_of(skeleton, Sequences(sequences, tokens, seed))
    compute = next(p.dtype for p in skeleton.parameters.values() if p.is_floating_point())
    return {key: in_dtype(value, compute) for key, value in inputs.items()}


def gradients_of(
    skeleton: Skeleton, inputs: Mapping[str, Any], loss_of: Loss
) -> tuple[float, dict[str, torch.Tensor | None], bool]:
    """The loss, the gradient of every parameter that has a recipe, and whether it computed in a narrower dtype."""
    casts = Casts(torch.float64)
    with torch.enable_grad(), casts:
        loss = loss_of(skeleton.model(**inputs))
    loss.backward()
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in skeleton.model.named_parameters(remove_duplicate=False):
        if name in skeleton.recipes:
            found[name] = parameter.grad
    for parameter in skeleton.model.parameters():
        parameter.grad = None
    return float(loss.detach()), found, casts.take()


def moved(skeleton: Skeleton, seed: int, by: float) -> None:
    """Move every weight by up to ``by`` of itself, for good."""
    generator = torch.Generator().manual_seed(seed + 3)
    with torch.no_grad():
        for parameter in skeleton.model.parameters():
            if parameter.is_floating_point():
                share = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
                parameter.mul_(1 + share * by)
