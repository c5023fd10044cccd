"""Finds the table of a quantisation method by ``quant_method`` of ``quantization_config``.

A method's module defines ``METHODS`` (the names that it serves) and ``formats(config) -> list[Format]``, the first of
which that fits a matrix is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tpshard.config import Config
from tpshard.errors import DamagedError, UnsupportedError

from . import (
    affine,
    aqlm,
    autoround,
    awq,
    bitnet,
    bitsandbytes,
    compressed,
    fp8,
    fpquant,
    gptq,
    modelopt,
    mxfp4,
    quark,
    torchao,
)
from .formats import Format

TABLES: tuple[ModuleType, ...] = (
    fp8, gptq, awq, compressed, mxfp4, modelopt, bitsandbytes, quark, autoround, aqlm, affine, fpquant, bitnet,
    torchao,
)  # fmt: skip

_ON_THE_FLY = "it quantises while it loads, and its files are of the original precision or of no use to another program"
REFUSED: Mapping[str, str] = {
    "eetq": "its weights are permuted and woven for the kernel of one GPU architecture, so that no row is in one place",
    "fouroversix": "its scales are stored in the woven order of one kernel, so that no rank's lie together",
    "gguf": "its weights are blocks of rows in .gguf files, which are not read here; convert them to safetensors first",
    "higgs": "its weights are rotated across 1,024 inputs, padded and permuted for one kernel and GPU",
    "hqq": "one byte holds values that lie half a matrix apart, so that no rank's rows are bytes of their own",
    "nvfp4": _ON_THE_FLY,
    "quanto": _ON_THE_FLY,
    "sinq": "one byte holds values that lie half a matrix apart, so that no rank's rows are bytes of their own",
    "spqr": "it stores tiles of 16 x 16 and a sparse list of outliers by rows, whose lengths only the values tell",
    "vptq": "it stores indices of vectors in a permuted order of inputs, packed across rows",
}
"""Methods that transformers loads and that cannot be cut, with the reason."""

_WAY_OUT = "use the checkpoint in its original precision, and quantise the ranks' parts when they are loaded"


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantisation that a ``config.json`` declares, None where it declares none.

    It lies under ``quantization_config``, in files of compressed-tensors of 2024 under ``compression_config``, and in
    some composite models in the language model's own config.

    Raises:
        DamagedError: it is not an object.
    """
    text = config.get("text_config")
    for values in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            found = values.get(key)
            if found is None:
                continue
            if not isinstance(found, Mapping):
                raise DamagedError(f"config.json: '{key}' is {found!r:.80}, not an object; restore it")
            return found
    return None


def method_of(values: Mapping[str, Any]) -> str:
    """The method that a quantisation config names, or is known by.

    Raises:
        DamagedError: it names none.
    """
    method = values.get("quant_method")
    if method is None:
        if values.get("load_in_8bit") or values.get("load_in_4bit"):
            return "bitsandbytes"  # files of 2023
        if "config_groups" in values:
            return "compressed-tensors"
        if {"bits", "group_size"} <= values.keys() and "mode" in values:
            return "metal"  # MLX writes no method
    if not isinstance(method, str) or not method:
        raise DamagedError("config.json: 'quantization_config' has no 'quant_method'; restore it")
    return method


def table_of(method: str) -> ModuleType | None:
    """The table that serves a method, None where there is none."""
    return next((table for table in TABLES if method.lower() in table.METHODS), None)


def formats_of(config: Mapping[str, Any]) -> list[Format]:
    """The formats in which a checkpoint with this ``config.json`` may hold matrices; none where it is not quantised.

    Raises:
        DamagedError: its quantisation config is no object, or has no method.
        UnsupportedError: no table serves the method, or not in this variant.
    """
    values = quantisation_of(config)
    if values is None:
        return []
    method = method_of(values)
    table = table_of(method)
    if table is not None:
        found: list[Format] = table.formats(Config(values))
        return found
    why = REFUSED.get(method.lower())
    raise UnsupportedError(
        f"config.json declares quantisation by {method!r}, which cannot be cut"
        + (f": {why}; {_WAY_OUT}" if why else f" (nothing is known of it here); {_WAY_OUT}")
    )
