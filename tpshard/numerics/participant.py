"""One runner of the model: the reference with the source's tensors, or a rank with its own.

Parameters are loaded when the model's code asks for them and dropped when the module that asked is
done; matrices, the embedding and the head are streamed. Hooks take the participant to the points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .bank import Bank, expert_recipe
from .batch import Batch
from .coverage import Coverage
from .lockstep import Group
from .operands import catch_product
from .passing import take_off_passed
from .points import Point
from .results import results_of
from .skeleton import Recipe, Skeleton
from .stores import Part, Store
from .streamed import StreamedMatrix, product


class Arrival(NamedTuple):
    """What a participant brings to a point. ``narrowed``: since the last point it computed in a narrower dtype."""

    kind: str
    values: list[Any]
    narrowed: bool
    parts: Part | None = None


class Participant:
    """Runs a skeleton against a store.

    Args:
        number: its place in the group, 0 for the reference; rank ``r`` is ``r + 1``.
        once: tensors that count on rank 0 alone.
        exact: tensors whose bytes are to be the same everywhere; their digests are kept in ``digests``.
        coverage: given to the reference alone; it then keeps a graph between points.
    """

    matrix = StreamedMatrix
    as_stored = False  # whether tensors keep the shape in which they are stored

    def __init__(
        self,
        number: int,
        skeleton: Skeleton,
        store: Store,
        points: Mapping[str, Point],
        *,
        compute: torch.dtype,
        device: torch.device,
        batch: Batch,
        group: Group,
        once: frozenset[str],
        exact: frozenset[str],
        tile_bytes: int,
        coverage: Coverage | None = None,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.number, self.skeleton, self.store, self.points = number, skeleton, store, points
        self.compute, self.device, self.batch, self.group = compute, device, batch, group
        self.once, self.exact, self.tile_bytes, self.coverage = once, exact, tile_bytes, coverage
        self.shapes = shapes
        self.digests: dict[str, str] = {}
        self.used: set[str] = set()  # tensors on disk that the model's code has asked for
        self._live: dict[str, torch.Tensor] = {}
        self._banks: dict[str, list[Recipe] | None] = {}
        self._find_banks()
        self._running = False
        self._gathered: set[str] = set()  # points of that kind that were passed
        self._casts = Casts(compute) if number == 0 else None
        self._place()

    # -- tensors --------------------------------------------------------------------------------

    @property
    def is_reference(self) -> bool:
        return self.number == 0

    def _watch(self, name: str) -> tuple[Callable[[memoryview], None] | None, Callable[[], None]]:
        if name not in self.exact or name in self.digests:
            return None, lambda: None
        from xxhash import xxh3_128

        state = xxh3_128()

        def done() -> None:
            self.digests[name] = state.hexdigest()

        return state.update, done

    def fetch(self, name: str) -> torch.Tensor:
        """A tensor on disk at full size, zero where this participant has nothing, or where it does not count."""
        self.used.add(name)
        part = self.store.parts.get(name)
        if part is None:
            return torch.zeros(self.shapes[name], dtype=self.compute, device=self.device)
        watch, done = self._watch(name)
        value = self.store.full(part, self.compute, watch).to(self.device)
        done()
        if name in self.once and self.number > 1:
            return torch.zeros_like(value)
        return value

    def load(self, parameter: str) -> Any:
        """What the model's code gets for a parameter or stored buffer; None: what it has."""
        if not self._running:
            return None
        parameter = self.skeleton.aliases.get(parameter, parameter)
        held = self._live.get(parameter)
        if held is None:
            recipe = self.skeleton.recipe_of(parameter)
            if recipe is None:
                return None
            if parameter in self._banks:
                return self._bank(parameter)
            for target, value in recipe.make(self.skeleton.model, self.fetch).items():
                if self.coverage is not None and target in self.skeleton.parameters:
                    value = self.coverage.leaf(target, value)
                self._live[target] = value
            held = self._live[parameter]
        return held

    def _bank(self, parameter: str) -> Bank:
        """What stands for a bank of experts."""
        recipe, shares = self.skeleton.recipes[parameter], self._banks[parameter]

        def make(index: int) -> torch.Tensor:
            if shares is not None:
                return shares[index].make(self.skeleton.model, self.fetch)[parameter][0]
            name = recipe.tensors[0][0]
            self.used.add(name)
            part = self.store.parts.get(name)
            if part is None:
                return torch.zeros(self.shapes[name][1:], dtype=self.compute, device=self.device)
            return self.store.row(part, index, self.compute, as_stored=self.as_stored).to(self.device)

        def whole() -> torch.Tensor:
            experts = recipe.targets[parameter][0]
            if self.coverage is None:
                return torch.stack([make(index) for index in range(experts)])
            return torch.stack([self.coverage.leaf(f"{parameter}[{n}]", make(n)) for n in range(experts)])

        return Bank(parameter, self.skeleton.parameters[parameter], make, whole, self.coverage)

    def _find_banks(self) -> None:
        """Parameters with one matrix an expert that can be made one at a time."""
        for path, point in self.points.items():
            module = self.skeleton.modules.get(path)  # not there where the shards' config has fewer layers
            for key, held in module._parameters.items() if point.experts and module is not None else ():
                name = f"{path}.{key}"
                recipe = self.skeleton.recipes.get(name)
                if held is None or held.dim() != 3 or recipe is None:
                    continue
                shares = expert_recipe(recipe, name, held.shape[0], self.skeleton.model)
                if recipe.plain or shares is not None:
                    self._banks[name] = shares
                    if self.coverage is not None:
                        self.coverage.divide(name, held.shape[0])

    def _drop(self) -> None:
        self._live.clear()

    # -- hooks ----------------------------------------------------------------------------------

    def _place(self) -> None:
        for path, module in self.skeleton.modules.items():
            point = self.points.get(path)
            if point is not None and point.kind == "sum" and isinstance(module, nn.Embedding):
                self._stream_table(path, module)
            else:
                self._stream_matrix(path, module, compact=point is not None and point.kind == "gather")
            if point is not None and point.passing and self.number > 1:
                take_off_passed(module, point.passing)
            if point is not None and point.experts:
                module.register_forward_pre_hook(self._route, with_kwargs=True)
            if point is not None and point.kind == "needs_sum":
                module.register_forward_pre_hook(self._before_norm(point), with_kwargs=True)
            if point is not None and point.operand:
                catch_product(module, point.operand, lambda out, point=point: self._meet(point, [out], None)[0])  # type: ignore[misc]
            if point is not None and point.kind != "needs_sum" and not point.operand:
                module.register_forward_hook(self._after(point), with_kwargs=True)
            elif module._parameters:
                module.register_forward_hook(lambda m, a, o: self._drop())
        self.skeleton.move_buffers(self.device)
        self.skeleton.install(self.load)

    def _stream_table(self, path: str, module: nn.Embedding) -> None:
        """Only the rows that are asked for are read: ids are replaced by places in a table of those rows."""
        name = f"{path}.weight"
        recipe = self.skeleton.recipe_of(name)
        if recipe is None or not recipe.plain:
            return
        module.padding_idx = None
        tensor = recipe.tensors[0][0]

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args or not torch.is_tensor(args[0]):
                return None
            wanted, places = torch.unique(args[0], return_inverse=True)
            self.used.add(tensor)
            part = self.store.parts.get(tensor)
            if part is None:
                width = self.shapes[tensor][1]
                table = torch.zeros((len(wanted), width), dtype=self.compute)
            else:
                table = self.store.rows(part, wanted.tolist(), self.compute)
            self._live[self.skeleton.aliases.get(name, name)] = table.to(self.device)
            return (places, *args[1:]), kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)

    def _stream_matrix(self, path: str, module: nn.Module, *, compact: bool) -> None:
        transposed = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
        if not transposed and type(module).forward is not nn.Linear.forward:
            return
        weight = f"{path}.weight" if path else "weight"
        recipe = self.skeleton.recipe_of(weight)
        if recipe is None or not recipe.plain:
            return
        name = recipe.tensors[0][0]
        bias = module._parameters.get("bias") is not None
        shape = tuple(self.skeleton.parameters[weight].shape)
        part = self.store.parts.get(name)
        parameter = self.skeleton.aliases.get(weight, weight)
        gathers = compact and not self.is_reference

        def forward(x: torch.Tensor) -> torch.Tensor:
            self.used.add(name)
            watch, done = self._watch(name)
            matrix = self.matrix(
                self.store, part, shape, self.compute, self.tile_bytes, parameter, transposed, gathers, watch
            )
            y = product(x.to(self.compute), matrix, self.coverage)  # narrower where the model has it so: see .promoting
            done()
            if bias:
                added = module.bias
                if gathers and added is not None:
                    full = self.skeleton.recipe_of(f"{path}.bias")
                    assert full is not None
                    self.used.add(full.tensors[0][0])
                    local = self.store.parts.get(full.tensors[0][0])
                    added = self.store.local(local, self.compute).to(self.device) if local is not None else 0
                y = y + added
            return y

        module.forward = forward

    def _route(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send the probe's tokens through every expert in turn."""
        args = tuple(args)
        named = [*((n, v) for n, v in enumerate(args)), *kwargs.items()]
        indices = next((v for _, v in named if torch.is_tensor(v) and not v.is_floating_point() and v.dim() == 2), None)
        if indices is None or self.batch.parts(indices) is None:
            return None
        experts = _expert_count(module)
        changed: dict[Any, torch.Tensor] = {}
        for key, value in named:
            if not torch.is_tensor(value) or value.shape != indices.shape:
                continue
            if value is indices:
                changed[key] = self.batch.routed(value, experts, self.is_reference)
            elif value.is_floating_point():
                changed[key] = self.batch.weighted(value, self.is_reference)
        return (
            tuple(changed.get(n, v) for n, v in enumerate(args)),
            {key: changed.get(key, value) for key, value in kwargs.items()},
        )

    def _before_norm(self, point: Point) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            shape = args[0].shape
            places = [n for n, v in enumerate(args) if torch.is_tensor(v) and v.shape == shape]
            part = self.store.parts.get(point.tensor)
            back = self._meet(point, [args[n] for n in places], part)
            out = list(args)
            for n, value in zip(places, back, strict=True):
                out[n] = value
            return tuple(out), kwargs

        return before

    def _after(self, point: Point) -> Any:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self._drop()
            if point.fallback and any(path.startswith(f"{point.path}.") for path in self._gathered):
                return None
            self._gathered |= {point.path} if point.kind == "gather" else set()
            many = isinstance(output, tuple)
            values = list(output) if many else [output]
            # What torch's own attention gives besides are weights, the mean over the heads that the rank has.
            rest = values[1:] if isinstance(module, nn.MultiheadAttention) else []
            values = values[: len(values) - len(rest)]
            part = None
            if point.kind == "replicated":
                values = [next((v for v in (*args, *kwargs.values()) if torch.is_tensor(v)), None), *values]
            elif point.kind == "gather":
                part = self.store.parts.get(point.tensor)
            back = self._meet(point, values, part)
            return (*back, *rest) if many else back[0]

        return after

    def _meet(self, point: Point, values: list[Any], part: Part | None) -> list[Any]:
        narrowed = self._casts is not None and self._casts.take()
        if self.coverage is not None:
            ends = values[1:] if point.kind == "replicated" else values
            with self._quiet():
                self.coverage.backward([v for v in ends if torch.is_tensor(v)], self.batch.cotangents)
        values = [v.detach() if torch.is_tensor(v) else v for v in values]
        back: list[Any] = self.group.meet(self.number, point.path, Arrival(point.kind, values, narrowed, part))
        return back

    def _quiet(self) -> Any:
        return self._casts.paused() if self._casts is not None else torch.no_grad()

    # -- running --------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, torch.Tensor]) -> Arrival:
        """One forward pass; returns its outputs as what is brought to the end."""
        self._running = True
        try:
            if self._casts is not None:
                with torch.set_grad_enabled(self.coverage is not None), self._casts:
                    outputs = self.skeleton.model(**inputs)
            else:
                with torch.no_grad():
                    outputs = self.skeleton.model(**inputs)
        finally:
            self._running = False
            self._drop()
        found = results_of(outputs)
        if self.coverage is not None:  # what acts behind the last point, as a scale of the logits does
            with self._quiet():
                self.coverage.backward([found.main, *found.others], self.batch.cotangents)
        values: list[Any] = [value.detach() for value in (found.main, *found.others)]
        return Arrival("logits" if found.are_logits else "hidden", values, self._narrowed())

    def _narrowed(self) -> bool:
        return self._casts is not None and self._casts.take()


def _expert_count(module: nn.Module) -> int:
    for held in module._parameters.values():
        if held is not None and held.dim() == 3:
            return int(held.shape[0])
    return int(getattr(module, "num_experts", 1))


class Casts(TorchDispatchMode):
    """Notices when a tensor of the computation's dtype is converted to a narrower one."""

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self._compute, self._bits = compute, torch.finfo(compute).bits
        self._seen, self._on = False, True

    def take(self) -> bool:
        """Whether it happened since the last call."""
        seen, self._seen = self._seen, False
        return seen

    def paused(self) -> Any:
        return _Pause(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            self._on
            and not self._seen
            and torch.is_tensor(out)
            and out.is_floating_point()
            and torch.finfo(out.dtype).bits < self._bits
            and args
            and torch.is_tensor(args[0])
            and args[0].dtype == self._compute
        ):
            self._seen = True
        return out


class _Pause:
    def __init__(self, casts: Casts) -> None:
        self._casts = casts

    def __enter__(self) -> None:
        self._casts._on = False

    def __exit__(self, *error: object) -> None:
        self._casts._on = True
