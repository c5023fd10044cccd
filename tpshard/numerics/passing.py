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
        held = module.__dict__["_parameters"]  # by name, also where values are made when they are asked for
        zeros = {key: torch.zeros((), dtype=out.dtype, device=out.device).expand(held[key].shape) for key in keys}
        module.__dict__["_parameters"] = {key: zeros[key] if key in zeros else held[key] for key in held}
        try:
            return out - forward(*args, **kwargs)
        finally:
            module.__dict__["_parameters"] = held

    module.forward = less
