"""Where a parameter meets an activation: every product of the model's run, seen at the operator.

Modules are no guide to this: banks of experts are multiplied a slice at a time, attention of some models
by an einsum. The operators are few: ``linear``, ``matmul``, ``bmm``, ``addmm``, ``einsum``. A parameter is
known by its storage, so that a slice or a transposed view of it is found as well.

Rectifiers and softmaxes run smooth under the watch: see :mod:`.smooth`. The proof of a table runs the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .smooth import smooth

F = torch.nn.functional
_LEFT_TIMES_RIGHT = frozenset(
    (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm)
)
_ADDED = frozenset((torch.addmm, torch.Tensor.addmm, torch.baddbmm, torch.Tensor.baddbmm))
_GROUPED = frozenset(
    found
    for name in ("_grouped_mm",)
    for found in (getattr(torch, name, None), getattr(F, "grouped_mm", None))
    if found
)


class Product(NamedTuple):
    """One product of a parameter with an activation.

    ``parameter`` is its name in the model, ``contracted`` the dimensions of the parameter that are summed over, and
    ``x [..., channels]`` the activation with the channels of those dimensions, in the order of the parameter, last.
    """

    parameter: str
    contracted: tuple[int, ...]
    x: torch.Tensor


class Lookup(NamedTuple):
    """A parameter that ids are looked up in, by its name in the model."""

    parameter: str


class Products(TorchFunctionMode):
    """Watches a run of the model.

    Args:
        parameters: by name in the model.
        seen: called with every product; gives back what goes on in place of its result, or None to leave it.
        looked_up: called with every table that ids are looked up in, and the rows; likewise.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        seen: Callable[[Product, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor | None],
        looked_up: Callable[[Lookup, torch.Tensor], torch.Tensor | None],
    ) -> None:
        super().__init__()
        self._seen, self._looked_up = seen, looked_up
        self._shapes = {name: tuple(value.shape) for name, value in parameters.items()}
        self._strides = {name: value.stride() for name, value in parameters.items()}
        self._by_storage: dict[int, str] = {}
        for name, value in parameters.items():
            self._by_storage.setdefault(value.untyped_storage().data_ptr(), name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = smooth(func, args, kwargs)
        if func is F.embedding:
            table = args[1] if len(args) > 1 else kwargs["weight"]
            name = self._name(table)
            back = self._looked_up(Lookup(name), result) if name else None
            return result if back is None else back
        found = self._product(func, args, kwargs)
        if found is None:
            return result
        product, again = found
        back = self._seen(product, again, result)
        return result if back is None else back

    def _name(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor) or not value.numel():
            return ""
        try:
            return self._by_storage.get(value.untyped_storage().data_ptr(), "")
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            return ""

    def _dims(self, name: str, view: torch.Tensor) -> list[int | None]:
        """For each dimension of a view the parameter's dimension that it runs along; None for one that it adds."""
        shape, strides = self._shapes[name], self._strides[name]
        out: list[int | None] = []
        for length, stride in zip(view.shape, view.stride(), strict=True):
            fitting = [d for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if s == stride and n == length]
            out.append(next((d for d in fitting if d not in out), None))
        return out

    def _product(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[Product, Callable[[torch.Tensor], torch.Tensor]] | None:
        """What is multiplied, and how to multiply another activation by the same parameter."""
        if func is F.linear and len(args) >= 2:
            return self._plain(args[0], args[1], -1, lambda x: func(x, *args[1:], **kwargs))
        if func in _LEFT_TIMES_RIGHT and len(args) == 2 and not kwargs:
            left, right = args
            if self._name(right):
                return self._plain(left, right, -2, lambda x: func(x, right))
            if self._name(left) and right.dim() >= 2 and left.dim() >= 2:
                return self._turned(left, right, lambda x: func(left, x))
        if func in _ADDED and len(args) == 3:
            return self._plain(args[1], args[2], -2, lambda x: func(args[0], x, args[2], **kwargs))
        if func in _GROUPED and len(args) >= 2:
            return self._plain(args[0], args[1], -2, lambda x: func(x, *args[1:], **kwargs))
        if func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
            return self._einsum(*args)
        return None

    def _plain(
        self, x: torch.Tensor, weight: Any, at: int, again: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[Product, Callable[[torch.Tensor], torch.Tensor]] | None:
        name = self._name(weight)
        if not name or weight.dim() < 2:
            return None
        along = self._dims(name, weight)[at]
        return None if along is None else (Product(name, (along,), x), again)

    def _turned(
        self, weight: torch.Tensor, x: torch.Tensor, again: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[Product, Callable[[torch.Tensor], torch.Tensor]] | None:
        along = self._dims(self._name(weight), weight)[-1]
        if along is None:
            return None
        return Product(self._name(weight), (along,), x.transpose(-1, -2)), lambda y: again(y.transpose(-1, -2))

    def _einsum(
        self, equation: str, first: Any, second: Any
    ) -> tuple[Product, Callable[[torch.Tensor], torch.Tensor]] | None:
        terms, _, out = equation.replace(" ", "").partition("->")
        names = terms.split(",")
        if "." in equation or len(names) != 2 or not out:
            return None
        which = 1 if self._name(second) else 0 if self._name(first) else None
        if which is None:
            return None
        weight, x = ((first, second), (second, first))[which][::1] if which == 0 else (second, first)
        ours, theirs = names[which], names[1 - which]
        summed = [letter for letter in ours if letter in theirs and letter not in out]
        dims = self._dims(self._name(weight), weight)
        along = [dims[ours.index(letter)] for letter in summed]
        if not summed or None in along:
            return None
        order = sorted(range(len(summed)), key=lambda n: along[n])  # type: ignore[arg-type, return-value]
        summed = [summed[n] for n in order]
        kept = [letter for letter in theirs if letter not in summed]
        sizes = {letter: x.shape[theirs.index(letter)] for letter in theirs}
        flat = x.permute([theirs.index(letter) for letter in (*kept, *summed)]).flatten(len(kept))

        def again(y: torch.Tensor) -> torch.Tensor:
            back = y.reshape([sizes[letter] for letter in (*kept, *summed)])
            back = back.permute([(*kept, *summed).index(letter) for letter in theirs])
            pair = (weight, back) if which == 0 else (back, weight)
            return torch.einsum(equation, *pair)

        return Product(self._name(weight), tuple(sorted(d for d in along if d is not None)), flat), again


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's floating-point parameters by name, each object once."""
    return {name: value for name, value in model.named_parameters() if value.is_floating_point()}
