"""The model's own class without weights, and where each of its parameters comes from on disk.

The model is built on the meta device from the config beside the weights. Checkpoints keep the hub's
names while models may join tensors on loading, so every parameter gets a *recipe*: the tensors on disk
that make it and the conversion that transformers applies to them (``core_model_loading.py``). All of
its conversions are placements, so tensors with zeros where a rank holds nothing give parameters with
zeros where it holds nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpshard.errors import DamagedError, TpshardError, UnsupportedError
from tpshard.listing import shown

from .configs import unknown_sizes
from .devices import told_cpu
from .promoting import promote_products


@dataclass(eq=False)
class Recipe:
    """How some parameters are made: ``tensors`` are (name on disk, pattern of the conversion that it matched).

    ``targets`` are the parameters that one conversion gives, with their shapes; ``plain`` says that the
    parameter is the tensor itself.
    """

    first: str
    transform: Any
    tensors: list[tuple[str, str]] = field(default_factory=list)
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the tensors, by name on disk

    @property
    def plain(self) -> bool:
        return type(self.transform).__name__ == "WeightRenaming" and len(self.tensors) == 1

    def make(self, model: Any, fetch: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters, from the tensors that ``fetch`` gives for names on disk."""
        if self.plain:
            return {self.first: fetch(self.tensors[0][0])}
        transform = deepcopy(self.transform)
        for name, pattern in self.tensors:
            transform.add_tensor(self.first, name, pattern, lambda name=name: fetch(name))
        made = transform.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class LazyTensors(dict[str, Any]):
    """A module's ``_parameters`` or ``_buffers``: a tensor is loaded when the model's code asks for it by name."""

    def __init__(self, held: Mapping[str, Any], path: str, load: Callable[[str], torch.Tensor | None]) -> None:
        super().__init__(held)
        self._path, self._load = path, load

    def __getitem__(self, name: str) -> Any:
        held = super().__getitem__(name)
        if held is None:
            return None
        loaded = self._load(f"{self._path}.{name}" if self._path else name)
        return held if loaded is None else loaded


class Skeleton:
    """A model on the meta device with a recipe for every parameter.

    Args:
        shapes: full shape and whether it is floating point, of every tensor on disk by name.

    Raises:
        UnsupportedError: transformers does not know the model or a size in its config, or its code is remote and
            not trusted.
        DamagedError: a parameter has no tensor, or one of another shape than the config gives it.
    """

    def __init__(
        self,
        root: Path,
        shapes: Mapping[str, tuple[int, ...]],
        compute: torch.dtype,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self.root = root
        self.model, self.attention = _built(root, compute, trust_remote_code)
        promote_products(self.model)
        state = self.model.state_dict()
        self.recipes: dict[str, Recipe] = {}
        self.extra = self._match(shapes, state)
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters(remove_duplicate=False))
        self.aliases = self._aliased()
        self.modules: dict[str, nn.Module] = dict(self.model.named_modules())
        missing = [name for name in self.parameters if name not in self.recipes and name not in self.aliases]
        missing = [name for name in missing if not self._is_computed(name)]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise self._contradiction(
                f"{shown(root)}: {type(self.model).__name__} has parameters for which there is no tensor: "
                f"{', '.join(missing[:5])}{more}; config.json and the weights are not of one model"
            )
        self._fill_buffers()

    def _match(self, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor]) -> list[str]:
        """Find the recipe of every parameter, as transformers' loader does; returns the tensors of no parameter."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix = self.model.base_model_prefix
        entries: dict[str, Recipe] = {}
        extra = []
        for name in sorted(shapes, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if renamed not in state and name in state:
                renamed, pattern = rename_source_key(name, [], [], prefix, state)
            if renamed not in state:
                extra.append(name)
                continue
            if pattern is not None:
                recipe = entries.setdefault(renamed, Recipe(renamed, by_pattern[pattern]))
            else:
                recipe = entries.setdefault(renamed, Recipe(renamed, WeightRenaming(name, renamed)))
                pattern = name
            recipe.tensors.append((name, pattern))
            recipe.shapes[name] = shapes[name]
        for recipe in entries.values():
            made = recipe.make(self.model, lambda name: torch.empty(shapes[name], device="meta"))
            for target, value in made.items():
                if target not in state:
                    raise UnsupportedError(
                        f"transformers makes {target} of {recipe.tensors[0][0]}, which the model lacks"
                    )
                if value.shape != state[target].shape:
                    raise self._contradiction(
                        f"{shown(self.root)}: {target} has the shape {list(state[target].shape)} by config.json and "
                        f"{list(value.shape)} by the weights ({recipe.tensors[0][0]}); they are not of one model"
                    )
                recipe.targets[target] = tuple(value.shape)
                self.recipes[target] = recipe
        return extra

    def _contradiction(self, message: str) -> TpshardError:
        """What it means that config and tensors do not fit: not damage where transformers passed a size over."""
        passed_over = unknown_sizes(self.root, self.model.config)
        if not passed_over:
            return DamagedError(message)
        return UnsupportedError(
            f"{message}, or transformers does not know what it says: {type(self.model.config).__name__} has no key "
            f"{', '.join(passed_over)}. Spell it as transformers does in the source's config.json and split again, or "
            "verify by bytes and plan"
        )

    def _aliased(self) -> dict[str, str]:
        """Parameters without tensors of their own that are one object with another that has some."""
        by_object = {id(p): name for name, p in self.parameters.items() if name in self.recipes}
        return {
            name: by_object[id(p)]
            for name, p in self.parameters.items()
            if name not in self.recipes and id(p) in by_object
        }

    def recipe_of(self, parameter: str) -> Recipe | None:
        """The recipe of a parameter or buffer, through its alias; None for a buffer that is computed."""
        return self.recipes.get(self.aliases.get(parameter, parameter))

    def _is_computed(self, name: str) -> bool:
        """Give a parameter what the class computes for it (sinusoids, seldom stored); False where it draws it."""
        path, _, leaf = name.rpartition(".")
        module, held = self.modules[path], self.parameters[name]
        made = []
        for seed in (0, 1):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed)
                value = torch.full_like(held, float("nan"), device="cpu")
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
                self._model_of(path)._init_weights(module)
            made.append(module._parameters[leaf])
        if torch.equal(made[0], made[1]) and not bool((made[0] == made[0].flatten()[0]).all()):
            self.parameters[name] = made[0]
            return True
        module._parameters[leaf] = held
        return False

    def _fill_buffers(self) -> None:
        """Compute the buffers that no tensor on disk gives, the way transformers does after loading."""
        owners: dict[str, list[str]] = {}
        for path, module in self.modules.items():
            for name, buffer in module._buffers.items():
                full = f"{path}.{name}" if path else name
                if buffer is None or full in self.recipes:
                    continue
                empty = torch.empty_like(buffer, device="cpu")
                if empty.is_floating_point():
                    empty.fill_(float("nan"))
                module._buffers[name] = empty
                owners.setdefault(path, []).append(name)
        for path, names in owners.items():
            buffers = self.modules[path]._buffers
            for around in _outwards(path):  # a module fills its own, or one around it fills them
                with torch.no_grad():
                    self._model_of(around)._init_weights(self.modules[around])
                lacking = [name for name in names if not _is_filled(buffers[name])]
                if not lacking:
                    break
            else:
                raise UnsupportedError(
                    f"{type(self.model).__name__} does not say how its buffer {path}.{lacking[0]} is computed; "
                    "a newer transformers may"
                )

    def _model_of(self, path: str) -> Any:
        """The innermost pre-trained model around a module: it knows how to fill the module's buffers."""
        from transformers import PreTrainedModel

        while path:
            module = self.modules[path]
            if isinstance(module, PreTrainedModel):
                return module
            path = path.rpartition(".")[0]
        return self.model

    def computed_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that come from the config and not from disk."""
        for name, buffer in self.model.named_buffers():
            if name not in self.recipes and buffer is not None:
                yield name, buffer

    def move_buffers(self, device: torch.device) -> None:
        """Put the computed buffers where the model is to run."""
        for path, module in self.modules.items():
            for held in (module._buffers, module._parameters):
                for name, value in held.items():
                    stored = (f"{path}.{name}" if path else name) in self.recipes
                    if value is not None and not value.is_meta and not stored:
                        held[name] = value.to(device)

    def install(self, load: Callable[[str], torch.Tensor | None]) -> None:
        """From now on every parameter and stored buffer is what ``load`` gives for its name.

        A conversion that asks the model how large a parameter is, while that is being made, sees its shape alone.
        """
        making = threading.local()

        def once(name: str) -> torch.Tensor | None:
            if getattr(making, "name", None) is not None:
                return None
            making.name = name
            try:
                return load(name)
            finally:
                making.name = None

        for path, module in self.modules.items():
            if module._parameters:
                module.__dict__["_parameters"] = LazyTensors(module._parameters, path, once)
            if any((f"{path}.{name}" if path else name) in self.recipes for name in module._buffers):
                module.__dict__["_buffers"] = LazyTensors(module._buffers, path, once)


def _outwards(path: str) -> Iterator[str]:
    """A module's path and those of the modules around it, the model's ("") last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _is_filled(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and not (buffer.is_floating_point() and bool(torch.isnan(buffer).any()))


def read_config(root: Path, trust_remote_code: bool) -> Any:
    """transformers' view of the ``config.json`` in ``root``; raises UnsupportedError where it has none."""
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        return transformers.AutoConfig.from_pretrained(
            str(root), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever the class makes of the values
        raise UnsupportedError(
            f"{shown(root)}: transformers {transformers.__version__} does not take this config.json "
            f"({_short(error)})"
            + ("" if trust_remote_code else "; code that comes with the model is run only with --trust-remote-code")
        ) from None


def model_class(config: Any, root: Path, trust_remote_code: bool) -> Any:
    """The class that runs a config; raises UnsupportedError where transformers has none."""
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    remote = trust_remote_code and getattr(config, "auto_map", None)
    cls = _remote_class(config, root) if remote else None
    if cls is None:
        cls = getattr(transformers, name or "", None)
    if cls is None:
        for auto in ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_MAPPING"):
            known = getattr(transformers, auto)
            if type(config) in known:
                cls = known[type(config)]
                break
    if cls is None or not hasattr(cls, "_from_config"):
        raise UnsupportedError(
            f"{shown(root)}: transformers {transformers.__version__} has no class {name or config.model_type!r}; "
            "install a newer one (code that comes with the model is run only with --trust-remote-code)"
        )
    return cls


def _built(root: Path, compute: torch.dtype, trust_remote_code: bool) -> tuple[Any, str]:
    config = _unquantised(read_config(root, trust_remote_code))
    cls = model_class(config, root, trust_remote_code)
    problem: Exception | None = None
    for attention in ("sdpa", "eager"):
        try:
            with torch.device("meta"):
                model = cls._from_config(
                    deepcopy(config), dtype=compute, attn_implementation=attention, experts_implementation="eager"
                )
        except (ValueError, ImportError, TypeError) as error:
            problem = error
            continue
        except Exception as error:  # whatever the model's own code makes of a config
            raise UnsupportedError(f"{shown(root)}: {cls.__name__} cannot be built: {_short(error)}") from None
        model.eval()
        model.config.use_cache = False
        return told_cpu(model), attention
    raise UnsupportedError(f"{shown(root)}: {cls.__name__} cannot be built: {_short(problem)}")


def _unquantised(config: Any) -> Any:
    """The config without its quantisation: the model is run on the values that the quantised tensors stand for."""
    for holder in (config, getattr(config, "text_config", None)):
        for key in ("quantization_config", "compression_config"):
            if getattr(holder, key, None) is not None:
                delattr(holder, key)
    return config


def _remote_class(config: Any, root: Path) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for auto in ("AutoModelForCausalLM", "AutoModel"):
        if auto in config.auto_map:
            try:
                return get_class_from_dynamic_module(config.auto_map[auto], str(root))
            except Exception as error:  # whatever the model's own code does
                raise UnsupportedError(
                    f"{shown(root)}: the model's own code ({config.auto_map[auto]}) cannot be loaded: {_short(error)}"
                ) from None
    return None


def _short(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
