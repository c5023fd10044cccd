"""A rank, or the original, as an ordinary model that holds its parameters and can be trained or generate.

The lockstep run of the level *forward* streams weights and compares at every point. The levels *backward*
and *runtime* need a model that stays: here parameters are made once from the same recipes, and hooks put
the collectives where a tensor-parallel runtime has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tpshard.manifest import Manifest
from tpshard.roles import COLUMN
from tpshard.traffic import NORM_ELEMENTS

from .exchange import Exchange, entered, gathered, joined, summed
from .operands import catch_product
from .passing import take_off_passed
from .points import Point, base_role
from .skeleton import Skeleton
from .stores import Part, Store, spans
from .ways import LOCAL

INSIDE = frozenset({"sinks", "ssm_conv", "ssm_head"})  # cut, but on what the ranks have already
LATENT = "kv_a"


def materialise(
    skeleton: Skeleton, fetch: Callable[[str], torch.Tensor], device: torch.device, *, trainable: bool
) -> nn.Module:
    """Give the skeleton's model its parameters, from ``fetch(name on disk)``; returns the model."""
    made: set[int] = set()
    for recipe in skeleton.recipes.values():
        if id(recipe) in made:
            continue
        made.add(id(recipe))
        for target, value in recipe.make(skeleton.model, fetch).items():
            value = value.to(device)
            path, _, leaf = target.rpartition(".")
            module = skeleton.modules[path]
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(value, requires_grad=trainable and value.is_floating_point())
            else:
                module._buffers[leaf] = value
    for name, other in skeleton.aliases.items():
        path, _, leaf = name.rpartition(".")
        at, _, its = other.rpartition(".")
        skeleton.modules[path]._parameters[leaf] = skeleton.modules[at]._parameters[its]
    for module in skeleton.modules.values():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it would hide the gradient of one row
    model: nn.Module = skeleton.model
    return model


def fetching(
    store: Store, mode: str, dtype: torch.dtype, once: frozenset[str], rank: int, shapes: Mapping[str, Any]
) -> Any:
    """``fetch(name)`` for a rank: tensors as stored or zero-padded; those that count once are zero beyond rank 0."""

    def fetch(name: str) -> torch.Tensor:
        part = store.parts.get(name)
        if part is None:
            return torch.zeros(shapes[name], dtype=dtype)
        value = store.local(part, dtype) if mode == LOCAL else store.full(part, dtype)
        return torch.zeros_like(value) if name in once and rank else value.clone()

    return fetch


def connect(
    skeleton: Skeleton,
    manifest: Manifest,
    points: Mapping[str, Point],
    parts: Mapping[str, Part],
    exchange: Exchange,
    mode: str,
    watch: Callable[[str, torch.Tensor], None] = lambda point, tensor: None,
) -> None:
    """Put the collectives of one rank into its model.

    Args:
        parts: what the rank stores of every tensor.
        watch: called with every sum that all ranks must have alike.
    """
    entries = _Entries(exchange)
    skeleton.model.register_forward_pre_hook(lambda m, a: entries.clear())  # a pass begins: the one before is over
    for path, module in skeleton.modules.items():
        point = points.get(path)
        point = None if point is not None and point.fallback else point
        roles = _roles(skeleton, manifest, path, module)
        if point is not None and point.kind == "needs_sum":
            module.register_forward_pre_hook(_before_norm(point, parts[point.tensor], exchange))
        elif LATENT in roles:
            module.register_forward_hook(lambda m, a, out, p=path: entered(out, exchange, p))
        elif (point is not None and point.kind == "gather") or (
            roles & COLUMN - INSIDE and not ("kv_b" in roles and _has_latent(manifest))
        ):
            module.register_forward_pre_hook(entries.hook(path), with_kwargs=True)
        if point is None:
            continue
        if point.kind == "gather":
            module.register_forward_hook(_after_head(point, parts, manifest, exchange, mode))
        elif point.kind == "sum":
            table = isinstance(module, nn.Embedding)
            if table and mode == LOCAL:
                _cut_table(skeleton, path, module, parts)
            if point.passing and exchange.rank:
                take_off_passed(module, point.passing)
            after = _after_sum(path, exchange, watch)
            if point.operand:
                catch_product(module, point.operand, lambda out, after=after, module=module: after(module, (), out))  # type: ignore[misc]
            else:
                module.register_forward_hook(after)


def _roles(skeleton: Skeleton, manifest: Manifest, path: str, module: nn.Module) -> set[str]:
    """Roles of the tensors that a module holds itself."""
    out = set()
    for leaf in (*module._parameters, *module._buffers):
        recipe = skeleton.recipe_of(f"{path}.{leaf}" if path else leaf)
        if recipe is not None:
            out |= {base_role(manifest.notes[name]) for name, _ in recipe.tensors}
    return out


def _has_latent(manifest: Manifest) -> bool:
    return any(base_role(note) == LATENT for note in manifest.notes.values())


class _Entries:
    """Enters a tensor into the ranks' blocks once, whatever number of modules take it: one sum of gradients."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._seen: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self._seen.clear()

    def __call__(self, x: torch.Tensor, point: str) -> torch.Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad and x.is_floating_point()):
            return x
        key = (x.data_ptr(), x.numel(), x.dtype)
        if not x.is_contiguous():
            return entered(x, self._exchange, point)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = (x, entered(x, self._exchange, point))  # x is kept: its address stays its own
        return found[1].view(x.shape)

    def hook(self, path: str) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def enter(number: object, value: Any) -> Any:
                return self(value, f"{path}/{number}") if torch.is_tensor(value) else value

            return tuple(enter(n, v) for n, v in enumerate(args)), {k: enter(k, v) for k, v in kwargs.items()}

        return before


def _after_sum(path: str, exchange: Exchange, watch: Callable[[str, torch.Tensor], None]) -> Any:
    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        total = summed(first, exchange, path)
        watch(path, total)
        return (total, *output[1:]) if isinstance(output, tuple) else total

    return after


def _after_head(point: Point, parts: Mapping[str, Part], manifest: Manifest, exchange: Exchange, mode: str) -> Any:
    cut = parts[point.tensor].cut
    places = [spans(cut.dims[0].ranks[rank]) for rank in range(manifest.tp_size)]
    width = cut.dims[0].extent
    if mode != LOCAL:
        # A zero-padded head gives all the vocabulary; what is exchanged is the rank's own part all the same.
        places = [[(index, index, length) for _, index, length in rows] for rows in places]

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if mode == LOCAL or output.shape[-1] == width:
            return gathered(output, exchange, point.path, places, width)
        there = output.shape[-1]  # some models leave off rows that only pad the vocabulary
        kept = [[(at, index, min(n, there - index)) for at, index, n in rows if index < there] for rows in places]
        return gathered(output, exchange, point.path, kept, there)

    return after


def _before_norm(point: Point, part: Part, exchange: Exchange) -> Any:
    """Assemble a norm's inputs over the ranks, each index from the first rank that has it."""
    mask = torch.zeros(part.full_shape[-1])
    runs = part.cut.dims[-1].ranks
    for _, index, length in spans(runs[part.rank]):
        mask[index : index + length] = 1
    for rank in range(part.rank):
        for _, index, length in spans(runs[rank]):
            mask[index : index + length] = 0

    def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
        shape = args[0].shape
        return tuple(
            joined(v, exchange, f"{point.path}/{n}", mask.to(v.device, v.dtype), 0 if n else NORM_ELEMENTS)
            if torch.is_tensor(v) and v.shape == shape
            else v
            for n, v in enumerate(args)
        )

    return before


def _cut_table(skeleton: Skeleton, path: str, module: nn.Embedding, parts: Mapping[str, Part]) -> None:
    """Look ids up in a rank's rows of the embedding; ids of other ranks give zero."""
    recipe = skeleton.recipe_of(f"{path}.weight")
    assert recipe is not None
    places = spans(parts[recipe.tensors[0][0]].runs(0))
    held: list[torch.Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
        ids = args[0]
        rows, mine = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for at, index, length in places:
            here = (ids >= index) & (ids < index + length)
            rows, mine = torch.where(here, ids - index + at, rows), mine | here
        held[:] = [mine]
        return (rows, *args[1:])

    def after(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(~held[0][..., None], 0)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
