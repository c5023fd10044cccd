"""Experts that pass their input on: what a module adds whether or not it has weights counts once, not once a rank.

LongCat's zero experts are identities inside the module whose output ranks sum. A rank beyond the first takes
off what the module would give with its row-parallel weights at zero, as a runtime would leave those experts
to one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def take_off_passed(module: nn.Module, keys: Sequence[str]) -> None:
    """From now on the module's output lacks what it is with the parameters ``keys`` at zero."""
    forward = module.forward

    def less(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        held = {key: module._parameters[key] for key in keys}
        try:
            for key, value in held.items():
                assert value is not None
                module._parameters[key] = nn.Parameter(torch.zeros_like(value), requires_grad=False)
            return out - forward(*args, **kwargs)
        finally:
            module._parameters.update(held)

    module.forward = less
