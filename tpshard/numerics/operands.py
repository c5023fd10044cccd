"""Row-parallel tensors that a module multiplies with itself, in the middle of its forward.

Most row-parallel matrices are modules of their own, and their output is what ranks sum. A module that holds
one directly and goes on with the product (XLNet's attention adds the residual and norms it) has no such output:
here the product itself is caught, of the parameter or of a view of all of it (Zamba's ``x_proj``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_PRODUCTS = frozenset(
    {torch.einsum, torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, nn.functional.linear,
     nn.functional.embedding}
)  # a look-up is one too: of a table in whose module a norm follows


def catch_product(module: nn.Module, key: str, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """From now on what ``after`` makes of a product with the parameter ``key`` stands for it in its module."""
    forward = module.forward

    def caught(*args: Any, **kwargs: Any) -> Any:
        with _Products(module, key, after):
            return forward(*args, **kwargs)

    module.forward = caught


class _Products(TorchFunctionMode):
    def __init__(self, module: nn.Module, key: str, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._module, self._key, self._after = module, key, after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _PRODUCTS:
            return out
        operand = self._module._parameters[self._key]
        return self._after(out) if any(_is_same(value, operand) for value in args) else out


def _is_same(value: Any, operand: Any) -> bool:
    """Whether an argument is the parameter, or all of it in another shape."""
    if not torch.is_tensor(value) or not torch.is_tensor(operand):
        return False
    return value is operand or (value.data_ptr() == operand.data_ptr() and value.numel() == operand.numel())
