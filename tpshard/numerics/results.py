"""What a model's forward gave, as tensors: logits first, or the last hidden states, then all else that is a number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

FIRST = ("logits", "prediction_logits", "lm_logits", "last_hidden_state")


class Results(NamedTuple):
    """``main``: logits, where ``are_logits``, or what the model gives in their place; ``others``: every other float."""

    main: torch.Tensor
    are_logits: bool
    others: list[torch.Tensor]


def results_of(outputs: Any) -> Results:
    """Sort a forward's outputs; raises TypeError where there is no floating-point tensor among them."""
    named = outputs if isinstance(outputs, Mapping) else {}
    name = next((key for key in FIRST if torch.is_tensor(named.get(key))), "")
    floats = list(_floats(outputs))
    if not floats:
        raise TypeError(f"a forward gave no numbers but {type(outputs).__name__}")
    main = named[name] if name else floats[0]
    return Results(main, name.endswith("logits"), [value for value in floats if value is not main])


def _floats(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for held in value.values():
            yield from _floats(held)
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from _floats(held)
