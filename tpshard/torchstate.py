"""What the pickle of a torch state dict is made of, as plain data: storages, and views of them.

Stands in for ``torch._utils._rebuild_tensor_v2`` and its like (``torch/_utils.py``), which would need
torch; the table goes to :func:`tpshard.inertpickle.load`, which calls nothing else. A call that does
not fit raises ``TypeError`` or ``ValueError``, which the reader turns into its own error.
"""

from __future__ import annotations

from typing import NamedTuple

from tpshard.header import DTYPE_BITS, MAX_DIMENSIONS
from tpshard.inertpickle import Function, ordered_dict

_LIMIT = 1 << 63

_STORAGE_DTYPES = {
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}
_TORCH_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


class _StorageType(NamedTuple):
    dtype: str


class _Dtype(NamedTuple):
    dtype: str


class Storage(NamedTuple):
    """A block of bytes that tensors are views of; ``dtype`` is that of its elements."""

    key: str
    dtype: str
    nbytes: int


class View(NamedTuple):
    """A tensor: its elements' places within a storage."""

    storage: Storage
    dtype: str
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements


def torch_dtypes() -> dict[str, str]:
    """What torch calls the dtypes of safetensors."""
    return {dtype: name for name, dtype in _TORCH_DTYPES.items()}


def torch_globals() -> dict[str, object]:
    """Every global that a state dict of plain tensors may name, by ``module.name``."""
    known: dict[str, object] = {
        "collections.OrderedDict": Function(ordered_dict),
        "torch._utils._rebuild_tensor": Function(_rebuild_tensor),
        "torch._utils._rebuild_tensor_v2": Function(_rebuild_tensor_v2),
        "torch._utils._rebuild_tensor_v3": Function(_rebuild_tensor_v3),
        "torch._utils._rebuild_parameter": Function(_rebuild_parameter),
        "torch._utils._rebuild_parameter_with_state": Function(_rebuild_parameter),
    }
    for storage, dtype in _STORAGE_DTYPES.items():
        for module in ("torch", "torch.cuda", "torch.storage"):
            known[f"{module}.{storage}"] = _StorageType(dtype)
    for torch_dtype, dtype in _TORCH_DTYPES.items():
        known[f"torch.{torch_dtype}"] = _Dtype(dtype)
    return known


def _count(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError(f"{what} of a tensor is not a number from 0 to 2**63")
    return value


def _counts(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMENSIONS:
        raise ValueError(f"{what} of a tensor is not a tuple of at most {MAX_DIMENSIONS} numbers")
    return tuple(_count(item, what) for item in value)


def _view(storage: object, dtype: str | None, offset: object, shape: object, stride: object) -> View:
    if not isinstance(storage, Storage):
        raise TypeError("a tensor without a storage")
    sizes, strides = _counts(shape, "the shape"), _counts(stride, "the stride")
    if len(sizes) != len(strides):
        raise ValueError(f"a tensor of {len(sizes)} sizes and {len(strides)} strides")
    return View(storage, dtype or storage.dtype, _count(offset, "the offset"), sizes, strides)


def _rebuild_tensor(storage: object, offset: object, shape: object, stride: object) -> View:
    return _view(storage, None, offset, shape, stride)


def _rebuild_tensor_v2(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object = None,
    hooks: object = None,
    metadata: object = None,
) -> View:
    _no_lazy_sign(metadata)
    return _view(storage, None, offset, shape, stride)


def _rebuild_tensor_v3(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> View:
    _no_lazy_sign(metadata)
    if not isinstance(dtype, _Dtype):
        raise TypeError("a tensor whose dtype is none of torch's")
    return _view(storage, dtype.dtype, offset, shape, stride)


def _no_lazy_sign(metadata: object) -> None:
    if isinstance(metadata, dict) and (metadata.get("conj") or metadata.get("neg")):
        raise ValueError("a tensor that is to be conjugated or negated when it is read")


def _rebuild_parameter(data: object, requires_grad: object = None, hooks: object = None, state: object = None) -> View:
    if not isinstance(data, View):
        raise TypeError("a parameter without a tensor")
    return data


def storage_of(found: object) -> Storage:
    """The storage that a persistent id names: ``("storage", type, key, device, elements[, view])``."""
    if not isinstance(found, tuple) or not found or found[0] != "storage" or not 5 <= len(found) <= 6:
        raise ValueError("a persistent id that names no storage")
    kind, key, elements = found[1], found[2], _count(found[4], "the size of the storage")
    if not isinstance(kind, _StorageType) or not isinstance(key, str):
        raise ValueError("a persistent id that names no storage")
    if len(found) == 6 and found[5] is not None:
        raise ValueError("a storage that is a part of another, as torch before 0.4 wrote them")
    return Storage(key, kind.dtype, elements * DTYPE_BITS[kind.dtype] // 8)
