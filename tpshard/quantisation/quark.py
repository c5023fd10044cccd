"""Quark (AMD): FP8 and int8 in the matrix's own shape, MXFP4 two values a byte.

``weight``, ``weight_scale`` (one value, one an output, ``[out, in / 32]`` for MXFP4), ``weight_zero_point``, static
scales ``input_scale`` and ``output_scale``. Integers of 4 bits are reordered for one kernel.
Source: AMD Quark documentation, "Exporting to Hugging Face format"; transformers ``quantizers/quantizer_quark.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpshard.config import Config
from tpshard.errors import UnsupportedError

from .compressed import fp4
from .formats import FLOATS8, ONE, Format
from .fp8 import BY_PART, PER_OUT, scaled

METHODS = ("quark",)
REORDERED = ("int4", "uint4", "int2")


def formats(c: Config) -> list[Format]:
    for where in ("global_quant_config", *sorted(c.get("layer_quant_config", default={}) or {})):
        config = c.get(where) if where == "global_quant_config" else c.get("layer_quant_config")[where]
        weight = config.get("weight") if isinstance(config, Mapping) else None
        dtype = weight.get("dtype") if isinstance(weight, Mapping) else None
        if dtype in REORDERED:
            raise UnsupportedError(
                f"config.json: Quark stores {dtype} with its values reordered inside the words, which is not known "
                "here well enough to be cut; use a checkpoint in FP8, int8 or MXFP4, or in its original precision"
            )
    forms = (*PER_OUT, *ONE, *BY_PART)
    return [
        scaled("FP8", FLOATS8, forms, zero=".weight_zero_point"),
        scaled("int8", frozenset({"I8"}), forms, zero=".weight_zero_point"),
        fp4("MXFP4", 32, weight=".weight"),
    ]
