"""Finds an engine's table by name. Nothing here knows any engine: the modules of tpshard.converters.engines do."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType

from tpshard.errors import UsageError


@lru_cache(maxsize=1)
def engines() -> Mapping[str, ModuleType]:
    """All engine tables by name, sorted."""
    package = importlib.import_module("tpshard.converters.engines")
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "ENGINE"):
            found[module.ENGINE] = module
    return dict(sorted(found.items()))


def engine_named(name: str) -> ModuleType:
    """The table of an engine.

    Raises:
        UsageError: there is none of this name.
    """
    found = engines().get(name)
    if found is None:
        raise UsageError(f"no engine is called {name!r:.80}; choose {', '.join(engines())} ('tpshard list engines')")
    return found
