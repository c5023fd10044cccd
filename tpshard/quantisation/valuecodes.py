"""Numbers of less than 16 bits: what their codes stand for, how they lie in words, and how results are rounded.

Floats of 8 bits: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2) and Noune et al., arXiv 2206.02915 (FNUZ: no
infinities, no negative zero, one more in the bias of the exponent). E8M0 and E2M1: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

NUMPY: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U32": "<u4", "I16": "<i2",
    "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "u1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E4M3FNUZ": "u1",
    "F8_E5M2FNUZ": "u1", "F8_E8M0": "u1", "F4": "u1",
}  # fmt: skip
"""numpy's name for the elements of every safetensors dtype in which a member is stored; F4 has two in each."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
_FLOATS = {  # exponent bits, mantissa bits, bias
    "F8_E4M3": (4, 3, 7), "F8_E5M2": (5, 2, 15), "F8_E4M3FNUZ": (4, 3, 8), "F8_E5M2FNUZ": (5, 2, 16),
}  # fmt: skip
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@cache
def table(dtype: str) -> Array:
    """The float32 of each of the 256 codes of a float of 8 bits."""
    code = np.arange(256)
    if dtype == "F8_E8M0":
        exponents = np.ldexp(np.float64(1), code - 127)
        exponents[255] = np.nan
        return np.asarray(exponents, np.float32)
    exponent_bits, mantissa_bits, bias = _FLOATS[dtype]
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    found: Array = np.where(exponent > 0, np.ldexp(1 + mantissa, exponent - bias), np.ldexp(mantissa, 1 - bias))
    found = np.where(code >= 128, -found, found)
    if dtype.endswith("FNUZ"):
        found[128] = np.nan
    elif dtype == "F8_E4M3":
        found[[127, 255]] = np.nan
    else:
        found = np.where(exponent == 31, np.where(mantissa > 0, np.nan, np.copysign(np.inf, found)), found)
    return np.asarray(found, np.float32)


def floats(stored: Array, dtype: str, *, exponents: bool = False) -> Array:
    """Stored elements as float32; with ``exponents`` bytes are powers of two, as in E8M0."""
    if dtype == "BF16":
        return np.asarray(stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in _FLOATS or dtype == "F8_E8M0":
        return np.asarray(table(dtype)[stored])
    if exponents and dtype == "U8":
        return np.asarray(table("F8_E8M0")[stored])
    return np.asarray(stored, np.float32)


def integers(words: Array, bits: int, axis: int, *, gapless: bool = True, order: Sequence[int] = ()) -> Array:
    """The unsigned integers of ``bits`` in words, lowest bits first, in place of the words along ``axis``: uint8.

    ``gapless`` integers may lie across words; else each word holds as many as fit whole. ``order`` says which number
    of each word's run the word's first, second, ... integer is.
    """
    words = np.ascontiguousarray(np.moveaxis(words, axis, -1))
    per_word = words.dtype.itemsize * 8 // bits
    if 8 % bits == 0:
        found = _in_bytes(words.view(np.uint8), bits)
    elif gapless:
        stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        found = np.zeros((*stream.shape[:-1], stream.shape[-1] // bits), np.uint8)
        for bit in range(bits):
            found |= stream[..., bit::bits] << bit
    else:
        shifts = np.arange(per_word, dtype=np.uint32) * bits
        found = ((words.view(f"u{words.dtype.itemsize}")[..., None] >> shifts) & (2**bits - 1)).astype(np.uint8)
    found = found.reshape(*words.shape[:-1], -1)
    if order:
        runs = found.reshape(*found.shape[:-1], -1, len(order))
        found = runs[..., np.argsort(order)].reshape(found.shape)
    return np.moveaxis(found, -1, axis)


def _in_bytes(codes: Array, bits: int) -> Array:
    """Integers of 1, 2, 4 or 8 bits."""
    if bits == 8:
        return codes
    each = 8 // bits
    out = np.empty((*codes.shape, each), np.uint8)
    for number in range(each):
        np.right_shift(codes, number * bits, out=out[..., number])
    out &= 2**bits - 1
    return out


def code_numbers(dtype: str) -> Array | None:
    """The number of every code of a dtype of 8 bits, float32; None of a wider one."""
    if dtype in _FLOATS or dtype == "F8_E8M0":
        return np.asarray(table(dtype))
    if dtype in ("U8", "I8"):
        codes = np.arange(256, dtype=np.float32)
        return np.where(codes > 127, codes - 256, codes).astype(np.float32) if dtype == "I8" else codes
    return None


def looked_up(table: Array, codes: Array, maps: Sequence[Array | None] = ()) -> Array:
    """The entry of a table for every code, in the codes' shape.

    Args:
        table: ``[*groups, codes]``, or ``[codes]`` for all.
        maps: the group of every index by dimension of ``codes``; None where it is its own number, or there is one.
    """
    if table.ndim == 1:
        return np.take(table, codes, mode="clip")  # no code is outside, and clipping is what numpy does fastest
    places = codes.astype(np.intp)
    stride = table.shape[-1]
    for axis in reversed(range(codes.ndim)):
        if table.shape[axis] > 1:
            found = maps[axis]
            along = (np.arange(codes.shape[axis]) if found is None else found) * stride
            places += along.reshape(-1, *[1] * (codes.ndim - axis - 1))
        stride *= table.shape[axis]
    return np.take(table.reshape(-1), places, mode="clip")


def rounded(values: Array, dtype: str) -> Array:
    """float32 in the dtype (codes of it, for BF16): to the nearest, and of two equally near ones to the even.

    NaN stays NaN.
    """
    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += bits
    odd += np.uint32(0x7FFF)
    odd >>= np.uint32(16)
    out: Array = odd.astype(np.uint16)
    broken = np.isnan(values)
    if broken.any():
        out[broken] = 0x7FC0
    return out
