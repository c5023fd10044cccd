"""Cut Hugging Face checkpoints into tensor-parallel per-rank files, re-cut them, join them, and prove it.

Every name is loaded when it is first used, so that ``import tpshard`` costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # of typing, whose import would take longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from .convert import merge, reshard, split
    from .demonstration import demo
    from .errors import (
        DamagedError,
        LayoutError,
        StorageError,
        TpshardError,
        UnsupportedError,
        UsageError,
    )
    from .options import Options
    from .previous import rollback
    from .survey import inspect, plan
    from .verification import verify

    __version__: str

__all__ = [
    "DamagedError",
    "LayoutError",
    "Options",
    "StorageError",
    "TpshardError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "demo",
    "inspect",
    "merge",
    "plan",
    "reshard",
    "rollback",
    "split",
    "verify",
]

_MODULES = {
    "convert": ("merge", "reshard", "split"),
    "demonstration": ("demo",),
    "errors": ("DamagedError", "LayoutError", "StorageError", "TpshardError", "UnsupportedError", "UsageError"),
    "options": ("Options",),
    "previous": ("rollback",),
    "survey": ("inspect", "plan"),
    "verification": ("verify",),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .release import VERSION

        return VERSION
    for module, names in _MODULES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
