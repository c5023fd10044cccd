"""Banks of experts that are never held whole: one expert's matrix is made when the model's code multiplies by it.

Models keep their experts in one parameter ``[experts, rows, columns]`` and take them by index. What they
get here for the parameter answers to an index with a stand-in for that expert's matrix, and a product
with the stand-in makes the matrix, from the files, for as long as the product takes. Any other use of
the parameter or of an expert makes the tensor and hands it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .coverage import Coverage
from .skeleton import Recipe

Make = Callable[[int], torch.Tensor]


def expert_recipe(recipe: Recipe, parameter: str, experts: int, model: Any) -> list[Recipe] | None:
    """For a bank that is joined from a tensor an expert: the recipe of each expert's share, or None if it is not.

    A share is converted as the whole is and is a bank of one. It is checked on tensors without contents
    that the conversion really does that.
    """
    if recipe.plain:
        return None
    by_pattern: dict[str, list[str]] = {}
    for name, pattern in recipe.tensors:
        by_pattern.setdefault(pattern, []).append(name)
    if any(len(names) != experts for names in by_pattern.values()) or len(recipe.targets) != 1:
        return None
    shares = [
        Recipe(recipe.first, recipe.transform, [(names[n], pattern) for pattern, names in by_pattern.items()])
        for n in range(experts)
    ]
    shapes = recipe.shapes
    try:
        made = shares[0].make(model, lambda name: torch.empty(shapes[name], device="meta"))
    except Exception:  # a conversion that wants all experts at once
        return None
    value = made.get(parameter)
    if value is None or tuple(value.shape) != (1, *recipe.targets[parameter][1:]):
        return None
    return shares


class Bank:
    """Stands for a parameter ``[experts, rows, columns]``."""

    def __init__(
        self,
        parameter: str,
        held: torch.Tensor,
        make: Make,
        whole: Callable[[], torch.Tensor],
        coverage: Coverage | None,
    ) -> None:
        self._parameter, self._held, self._make, self._coverage = parameter, held, make, coverage
        self._whole = whole

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) or (torch.is_tensor(index) and index.dim() == 0 and not index.is_floating_point()):
            return ExpertMatrix(f"{self._parameter}[{int(index)}]", int(index), self._make, self._coverage)
        return self._whole()[index]

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "ndim", "dim", "size"):
            return getattr(self._held, name)
        return getattr(self._whole(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_tensors(args), **_tensors(kwargs or {}))


class ExpertMatrix:
    """Stands for one expert's matrix ``[rows, columns]``."""

    def __init__(self, name: str, index: int, make: Make, coverage: Coverage | None) -> None:
        self._name, self._index, self._make, self._coverage = name, index, make, coverage

    def tensor(self) -> torch.Tensor:
        """The matrix itself, watched where gradients are."""
        value = self._make(self._index)
        return value if self._coverage is None else self._coverage.leaf(self._name, value)

    def times(self, x: torch.Tensor, transposed: bool) -> torch.Tensor:
        """``x @ matrix``, or with ``transposed`` ``x @ matrix.T``."""
        if self._coverage is None:
            return _times(x, self._make(self._index), transposed)
        anchor = torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
        return _ExpertProduct.apply(x, anchor, self, transposed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(args) >= 2 and isinstance(args[1], ExpertMatrix) and torch.is_tensor(args[0]):
            if func is nn.functional.linear and args[0].dim() >= 1:
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                out = args[1].times(args[0], True)
                return out if bias is None else out + _tensors([bias])[0]
            if func in _MATMULS and args[0].dim() >= 2 and not kwargs:
                return args[1].times(args[0], False)
        return func(*_tensors(args), **_tensors(kwargs))


_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


def _tensors(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _tensors([value])[0] for key, value in values.items()}
    return [
        value.tensor() if isinstance(value, ExpertMatrix) else value._whole() if isinstance(value, Bank) else value
        for value in values
    ]


def _times(x: torch.Tensor, matrix: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x @ (matrix.T if transposed else matrix)


class _ExpertProduct(torch.autograd.Function):
    """The product for the reference: the matrix is made again on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, expert: ExpertMatrix, transposed: bool) -> Any:
        ctx.expert, ctx.transposed = expert, transposed
        ctx.save_for_backward(x)
        return _times(x, expert._make(expert._index), transposed)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (g,) = cotangents
        (x,) = ctx.saved_tensors
        expert, coverage = ctx.expert, ctx.expert._coverage
        flat, back = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        if ctx.transposed:
            coverage.product(expert._name, flat, back)
        else:
            coverage.product(expert._name, back, flat)
        gx = None
        if ctx.needs_input_grad[0]:
            gx = _times(g, expert._make(expert._index), not ctx.transposed)
        return gx, None, None, None
