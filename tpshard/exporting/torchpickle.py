"""The pickle of a torch state dict, written without torch: tensors as views of storages, and plain values beside them.

``torch.save`` would need the tensors; a plan has their names, dtypes and shapes only, and bytes that it moves itself.
What is written is protocol 2 with the globals that torch's own files have (``torch/_tensor.py``, ``__reduce_ex__``),
and nothing is remembered in a memo: a tensor is some 150 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

_STORAGES = {
    "BOOL": "BoolStorage",
    "U8": "ByteStorage",
    "I8": "CharStorage",
    "I16": "ShortStorage",
    "I32": "IntStorage",
    "I64": "LongStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "F32": "FloatStorage",
    "F64": "DoubleStorage",
    "C64": "ComplexFloatStorage",
}
_NEWER = {
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Dtypes that have no storage class of their own: a view of bytes that names its dtype (``_rebuild_tensor_v3``)."""

DTYPES = {**{dtype: _STORAGES[dtype] for dtype in _STORAGES}, **_NEWER}
"""The dtypes of safetensors that torch can save."""


class TensorAt(NamedTuple):
    """A tensor of ``shape`` that is the whole of the storage ``key``."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Namespace(NamedTuple):
    """An ``argparse.Namespace`` with these attributes."""

    values: Mapping[str, object]


def pickled(value: object) -> bytes:
    """The pickle of a value of dicts, lists, tuples, texts, numbers, booleans, None, namespaces and tensors.

    Raises:
        TypeError: it holds anything else.
    """
    out = bytearray(b"\x80\x02")
    _put(out, value)
    return bytes(out + b".")


def _put(out: bytearray, value: object) -> None:
    if isinstance(value, TensorAt):
        _put_tensor(out, value)
    elif isinstance(value, Namespace):
        out += b"cargparse\nNamespace\n)\x81"
        _put(out, dict(value.values))
        out += b"b"
    elif value is None:
        out += b"N"
    elif isinstance(value, bool):
        out += b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        _put_int(out, value)
    elif isinstance(value, float):
        out += b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        out += b"X" + struct.pack("<I", len(data)) + data
    elif isinstance(value, Mapping):
        out += b"}"
        if value:
            out += b"("
            for key, item in value.items():
                _put(out, key)
                _put(out, item)
            out += b"u"
    elif isinstance(value, tuple):
        _put_tuple(out, value)
    elif isinstance(value, list):
        out += b"]"
        if value:
            out += b"("
            for item in value:
                _put(out, item)
            out += b"e"
    else:
        raise TypeError(f"a {type(value).__name__} has no place in a state dict")


def _put_int(out: bytearray, value: int) -> None:
    if 0 <= value < 1 << 8:
        out += b"K" + struct.pack("<B", value)
    elif 0 <= value < 1 << 16:
        out += b"M" + struct.pack("<H", value)
    elif -(1 << 31) <= value < 1 << 31:
        out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
        out += b"\x8a" + struct.pack("<B", len(data)) + data


def _put_tuple(out: bytearray, value: Sequence[object]) -> None:
    if not value:
        out += b")"
        return
    if len(value) > 3:
        out += b"("
    for item in value:
        _put(out, item)
    out += {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t")


def _put_tensor(out: bytearray, tensor: TensorAt) -> None:
    newer = _NEWER.get(tensor.dtype)
    elements = prod(tensor.shape)
    out += b"ctorch._utils\n" + (b"_rebuild_tensor_v3" if newer else b"_rebuild_tensor_v2") + b"\n(("
    _put(out, "storage")
    out += b"ctorch.storage\nUntypedStorage\n" if newer else f"ctorch\n{_STORAGES[tensor.dtype]}\n".encode()
    _put(out, tensor.key)
    _put(out, "cpu")
    _put_int(out, tensor.nbytes if newer else elements)
    out += b"tQK\x00"
    _put_tuple(out, tensor.shape)
    _put_tuple(out, _strides(tensor.shape))
    out += b"\x89ccollections\nOrderedDict\n)R"
    if newer:
        out += f"ctorch\n{newer}\n".encode()
    out += b"tR"


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours of a contiguous tensor, as torch counts them."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
