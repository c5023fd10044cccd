"""Products of two precisions, in models that keep some modules in float32 whatever the rest runs in.

Such a model widens what comes into a router or a convolution to float32 and multiplies it with weights that it keeps
in float32. Where everything runs in float64, both meet as they are: the narrower is widened.

Others make constants in torch's default dtype, and the least float64 is no float32 (XGLM's mask): where a model runs
in float64, that is the default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_PRODUCTS = frozenset(
    {torch.einsum, torch.matmul, torch.bmm, torch.Tensor.matmul, nn.functional.linear, nn.functional.conv1d,
     torch.conv1d}
)  # fmt: skip


def promote_products(model: nn.Module) -> None:
    """From now on the model's products take tensors of two precisions, if it keeps modules in float32."""
    if not any(getattr(model, f"_keep_in_fp32_modules{strict}", None) for strict in ("", "_strict")):
        return
    model.forward = _Promoted(model.forward)


@contextmanager
def float64_by_default(compute: torch.dtype) -> Iterator[None]:
    """Where a model runs in float64, the tensors that it makes without a dtype are float64 as well."""
    usual = torch.get_default_dtype()
    if compute == torch.float64:
        torch.set_default_dtype(compute)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


class _Promoted:
    """A model's forward; a copy of the model copies it along, bound to the copy."""

    def __init__(self, forward: Any) -> None:
        self.__wrapped__ = forward  # where its signature is looked for

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Promoting():
            return self.__wrapped__(*args, **kwargs)


class _Promoting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            kinds = {value.dtype for value in args if _is_real(value)}
            if len(kinds) > 1:
                widest = reduce(torch.promote_types, kinds)
                args = tuple(value.to(widest) if _is_real(value) else value for value in args)
        return func(*args, **(kwargs or {}))


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
