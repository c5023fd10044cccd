"""A loss to send gradients through a model with, and the inputs for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from .participant import Casts
from .skeleton import Skeleton


class Loss:
    """Cross entropy with random labels where a model gives logits, else a random weighting of the hidden states."""

    def __init__(self, ids: torch.Tensor, seed: int) -> None:
        self._ids, self._seed = ids, seed

    def __call__(self, outputs: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed + 2)
        logits = getattr(outputs, "logits", None)
        if logits is None:
            hidden = outputs[0]
            weights = torch.randn(hidden.shape, generator=generator, dtype=torch.float32).to(hidden)
            pooled = getattr(outputs, "pooler_output", None)
            loss = (hidden * weights).sum() / hidden.shape[-1]
            return loss if pooled is None else loss + pooled.square().mean()
        labels = torch.randint(0, logits.shape[-1], self._ids.shape, generator=generator).to(logits.device)
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def inputs_for(skeleton: Skeleton, sequences: int, tokens: int, seed: int) -> dict[str, Any]:
    """Random token ids ``[sequences, tokens]`` with a mask of ones, as the model takes them."""
    table = skeleton.model.get_input_embeddings()
    path = next(path for path, module in skeleton.modules.items() if module is table)
    vocabulary = skeleton.parameters[f"{path}.weight"].shape[0]  # as the model has it: a rank's own may be narrower
    ids = torch.randint(0, vocabulary, (sequences, tokens), generator=torch.Generator().manual_seed(seed))
    takes = inspect.signature(skeleton.model.forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in takes:
        inputs["attention_mask"] = torch.ones_like(ids)
    if "use_cache" in takes:
        inputs["use_cache"] = False
    return inputs


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
