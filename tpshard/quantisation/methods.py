"""Finds the table of a quantisation method by ``quant_method`` of ``quantization_config``.

A method's module defines ``METHODS`` (the names that it serves) and ``formats(config) -> list[Format]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tpshard.config import Config
from tpshard.errors import DamagedError, UnsupportedError

from . import awq, fp8, gptq
from .formats import Format

_TABLES: tuple[ModuleType, ...] = (awq, fp8, gptq)


def formats_of(values: Any) -> list[Format]:
    """The formats that a checkpoint with this ``quantization_config`` may hold matrices in.

    Raises:
        DamagedError: it is no object, or has no method.
        UnsupportedError: no table serves the method, or not in this variant.
    """
    if not isinstance(values, Mapping):
        raise DamagedError(f"config.json: 'quantization_config' is {values!r:.80}, not an object; restore it")
    method = values.get("quant_method")
    if not isinstance(method, str) or not method:
        raise DamagedError("config.json: 'quantization_config' has no 'quant_method'; restore it")
    for table in _TABLES:
        if method in table.METHODS:
            found: list[Format] = table.formats(Config(values))
            return found
    raise UnsupportedError(
        f"config.json declares quantisation by {method!r}, which cannot be cut yet: "
        "use the checkpoint in its original precision"
    )
