"""The pickle of a torch state dict, written without torch: tensors as views of storages, and plain values beside them.

``torch.save`` would need the tensors; a plan has their names, dtypes and shapes only, and bytes that it moves itself.
What is written is protocol 2 with the globals that torch's own files have (``torch/_tensor.py``, ``__reduce_ex__``),
and only globals go to the memo: a tensor is some 100 bytes.
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


_BATCH = 2000  # keys and values of a container at a time, as Python has it: readers keep them on a stack


class TensorAt(NamedTuple):
    """A tensor of ``shape`` that is the whole of the storage ``key``."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Namespace(NamedTuple):
    """An ``argparse.Namespace`` with these attributes."""

    values: Mapping[str, object]


class Global(NamedTuple):
    """A class or function, by its module and name."""

    module: str
    name: str


class Built(NamedTuple):
    """An object of a class, made without its constructor and given this state (``NEWOBJ`` and ``BUILD``)."""

    kind: Global
    state: object


class Called(NamedTuple):
    """What a function gives for these arguments (``REDUCE``)."""

    function: Global
    arguments: tuple[object, ...]


def pickled(value: object) -> bytes:
    """The pickle of a value of dicts, lists, tuples, texts, numbers, booleans, None, namespaces and tensors.

    Raises:
        TypeError: it holds anything else.
    """
    pickler = _Pickler()
    pickler.put(value)
    return bytes(pickler.out + b".")


class _Pickler:
    """The opcodes so far, and which globals are in the memo: each is written out once."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[str, bytes] = {}
        self._tensors: dict[tuple[str, tuple[int, ...]], tuple[bytes, bytes]] = {}  # what is around the key

    def put(self, value: object) -> None:
        out = self.out
        if isinstance(value, TensorAt):
            self._put_tensor(value)
        elif isinstance(value, Namespace):
            self.put(Built(Global("argparse", "Namespace"), dict(value.values)))
        elif isinstance(value, Built):
            self._put_global(*value.kind)
            out += b")\x81"
            self.put(value.state)
            out += b"b"
        elif isinstance(value, Called):
            self._put_global(*value.function)
            self._put_tuple(value.arguments)
            out += b"R"
        elif isinstance(value, Global):
            self._put_global(*value)
        elif value is None:
            out += b"N"
        elif isinstance(value, bool):
            out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self._put_int(value)
        elif isinstance(value, float):
            out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            out += b"X" + struct.pack("<I", len(data)) + data
        elif isinstance(value, Mapping):
            out += b"}"
            self._put_batches([item for pair in value.items() for item in pair], b"u")
        elif isinstance(value, tuple):
            self._put_tuple(value)
        elif isinstance(value, list):
            out += b"]"
            self._put_batches(value, b"e")
        else:
            raise TypeError(f"a {type(value).__name__} has no place in a state dict")

    def _put_batches(self, items: Sequence[object], end: bytes) -> None:
        for first in range(0, len(items), _BATCH):
            self.out += b"("
            for item in items[first : first + _BATCH]:
                self.put(item)
            self.out += end

    def _put_global(self, module: str, name: str) -> None:
        text = f"c{module}\n{name}\n"
        if text not in self._memo:
            self._memo[text] = b"h" + bytes([len(self._memo)])
            self.out += text.encode() + b"q" + self._memo[text][1:]
        else:
            self.out += self._memo[text]

    def _put_int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K" + struct.pack("<B", value)
        elif 0 <= value < 1 << 16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
            self.out += b"\x8a" + struct.pack("<B", len(data)) + data

    def _put_tuple(self, value: Sequence[object]) -> None:
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.put(item)
        self.out += {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t")

    def _put_tensor(self, tensor: TensorAt) -> None:
        known = self._tensors.get((tensor.dtype, tensor.shape))
        if known is not None:
            self.out += known[0]
            self.put(tensor.key)
            self.out += known[1]
            return
        begin, memo, newer = len(self.out), len(self._memo), _NEWER.get(tensor.dtype)
        self._put_global("torch._utils", "_rebuild_tensor_v3" if newer else "_rebuild_tensor_v2")
        self.out += b"(("
        self.put("storage")
        if newer:
            self._put_global("torch.storage", "UntypedStorage")
        else:
            self._put_global("torch", _STORAGES[tensor.dtype])
        key_at = len(self.out)
        self.put(tensor.key)
        key_end = len(self.out)
        self.put("cpu")
        self._put_int(tensor.nbytes if newer else prod(tensor.shape))
        self.out += b"tQK\x00"
        self._put_tuple(tensor.shape)
        self._put_tuple(_strides(tensor.shape))
        self.out += b"\x89"
        self._put_global("collections", "OrderedDict")
        self.out += b")R"
        if newer:
            self._put_global("torch", newer)
        self.out += b"tR"
        if len(self._memo) == memo:  # all globals were known already, so that the next one is written alike
            around = bytes(self.out[begin:key_at]), bytes(self.out[key_end:])
            self._tensors[tensor.dtype, tensor.shape] = around


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours of a contiguous tensor, as torch counts them."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
