"""A model on the meta device whose own code is told that it is on the CPU.

The verifier keeps a model's parameters on the meta device and brings each when it is wanted; what flows through the
model is on the CPU. Code that moves its inputs to ``self.device`` (Idefics 3) must not follow the parameters.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def told_cpu(model: Any) -> Any:
    """The model, every module of which that has a ``device`` says CPU."""
    for module in model.modules():
        cls: Any = type(module)
        if isinstance(getattr(cls, "device", None), property):
            module.__class__ = _on_cpu(cls)
    return model


@cache
def _on_cpu(cls: Any) -> Any:
    told = {"device": property(lambda self: torch.device("cpu")), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), {**told, "__qualname__": cls.__qualname__})
