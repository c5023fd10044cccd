"""Finds the table for a model. Nothing here knows any family: the modules of tpshard.converters do.

A converter module defines ``FAMILY`` (its name), ``MODEL_TYPES`` (the ``model_type`` values of
config.json that it serves) and ``table(config) -> Table``. One that serves parts of other models may
define ``USUAL``, by model type the defaults of the config class, which nested configs leave out.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import Config
from .errors import TpshardError, UnsupportedError, UsageError
from .table import Table

_given: ContextVar[ModuleType | None] = ContextVar("given_table", default=None)


@lru_cache(maxsize=1)
def families() -> Mapping[str, ModuleType]:
    """All converter modules by family name, sorted."""
    from . import converters

    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(converters.__path__):
        module = importlib.import_module(f"{converters.__name__}.{info.name}")
        if hasattr(module, "FAMILY"):
            found[module.FAMILY] = module
    return dict(sorted(found.items()))


@lru_cache(maxsize=1)
def _by_model_type() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for module in families().values():
        for model_type in module.MODEL_TYPES:
            if model_type in found:
                raise RuntimeError(f"two tables claim {model_type!r}: {found[model_type].FAMILY}, {module.FAMILY}")
            found[model_type] = module
    return found


@cache
def _found(model_type: str) -> ModuleType | None:
    """The module that serves a model type; imports no more than those whose text holds the name.

    All of them are more than a hundred, and a conversion needs one or two.
    """
    from . import converters

    word = f'"{model_type}"'.encode()
    for info in pkgutil.iter_modules(converters.__path__):
        if info.ispkg:
            continue
        source = Path(getattr(info.module_finder, "path", ""), f"{info.name}.py")
        if not source.is_file():  # installed without sources
            return _by_model_type().get(model_type)
        if word in source.read_bytes():
            module = importlib.import_module(f"{converters.__name__}.{info.name}")
            if model_type in getattr(module, "MODEL_TYPES", ()):
                return module
    return None


def family_of(values: Mapping[str, Any]) -> str:
    """The name of the family that serves this config.

    Raises:
        UnsupportedError: no table serves the config's ``model_type``.
    """
    config, given = Config(values), _given.get()
    if given is not None:
        _require_use(given, config)
    return str(_module(config).FAMILY)


def table_for(values: Mapping[str, Any]) -> Table:
    """The table that a checkpoint with this ``config.json`` is cut by.

    Raises:
        UnsupportedError: no table serves its ``model_type``, or a count is missing.
        DamagedError: a count is not a whole number.
    """
    return table_of(Config(values))


def table_of(config: Config) -> Table:
    """Like :func:`table_for`, for a part of a config that is a model's by itself (``text_config``)."""
    module = _module(config)
    if module is _given.get():
        return _from_given(module, config)
    table: Table = module.table(config)
    return table


def part_of(config: Config, *names: str, model_type: str) -> Config:
    """The nested config of a part that is a model by itself, completed by what its config class has by default.

    ``model_type`` is the part's where its config does not say.

    Raises:
        DamagedError: there is none.
        UnsupportedError: no table serves its ``model_type``.
    """
    part = config.nested(*names, model_type=model_type)
    usual: Mapping[str, Any] = getattr(_module(part), "USUAL", {}).get(part.model_type, {})
    return part.with_usual(**usual)


@contextmanager
def given_table(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Inside, the table in this file serves its model types, before those that are installed; None: nothing changes.

    The file is Python that is executed: a user's own word is the only way to here.

    Raises:
        UsageError: it cannot be read, fails when it is executed, or is no converter.
    """
    token = _given.set(None if path is None else _executed(Path(path)))
    try:
        yield
    finally:
        _given.reset(token)


def _executed(path: Path) -> ModuleType:
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"the table {path} cannot be read: {error}") from None
    module = ModuleType("tpshard_given_table")
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:  # whatever the file does
        raise UsageError(f"the table {path} fails: {type(error).__name__}: {error}") from None
    lacking = [name for name in ("FAMILY", "MODEL_TYPES", "table") if not hasattr(module, name)]
    if lacking:
        raise UsageError(f"{path} is no table: it defines no {' and no '.join(lacking)}; see converters/README.md")
    types = module.MODEL_TYPES
    if not isinstance(types, tuple | list) or not all(isinstance(kind, str) for kind in types):
        raise UsageError(f"{path} is no table: MODEL_TYPES is {types!r:.80}, not a tuple of names")
    module.__file__ = str(path)
    return module


def _require_use(given: ModuleType, config: Config) -> None:
    """Raise UsageError where nothing in the config is of a model type that the given table serves."""
    todo: list[Any] = [config.values]
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            if value.get("model_type") in given.MODEL_TYPES:
                return
            todo += value.values()
    raise UsageError(
        f"the table {given.__file__} serves {', '.join(given.MODEL_TYPES)}, and this model is of the model_type "
        f"{config.model_type!r}; name the table of this model, or leave --table out"
    )


def _from_given(given: ModuleType, config: Config) -> Table:
    try:
        table = given.table(config)
    except TpshardError:
        raise
    except Exception as error:  # whatever the file does
        raise UsageError(f"the table {given.__file__} fails on this config: {type(error).__name__}: {error}") from None
    if not isinstance(table, Table):
        raise UsageError(f"the table {given.__file__} gives a {type(table).__name__}, not a Table")
    return table


def _module(config: Config) -> ModuleType:
    model_type = config.model_type
    given = _given.get()
    if given is not None and model_type in given.MODEL_TYPES:
        return given
    module = _found(model_type)
    if module is None:
        raise UnsupportedError(
            f"no table serves model_type {model_type!r}; 'tpshard list families' shows those that do, "
            "and converters/README.md how to add one"
        )
    return module
