"""The safetensors header: what tensors a file holds, and where; and the bytes of a new one.

Pure functions over ``read(offset, nbytes) -> bytes``; nothing here opens a file. The format is that of
the reference implementation (huggingface/safetensors, ``safetensors/src/tensor.rs``): an unsigned
little-endian 64-bit length ``n``, ``n`` bytes of JSON padded with spaces, then the tensors' bytes with
neither hole nor overlap up to the end of the file. All offsets are bytes; ranges are half-open.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpshard.errors import DamagedError, UnsupportedError
from tpshard.strictjson import parse_object

Read = Callable[[int, int], bytes]
"""``read(offset, nbytes)``: exactly ``nbytes`` bytes, or fewer where the file ends before."""

Frame = tuple[tuple[int, bytes], ...]
"""``(offset, bytes)`` of every byte of a file that is not tensor data; sorted and disjoint."""

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, for every dtype of safetensors 0.8 (``enum Dtype`` in ``tensor.rs``)."""

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
MAX_DIMENSIONS = 64  # torch and numpy take no more
_LIMIT = 1 << 63
_AGAIN = "Download or copy the file again."


class TensorInfo(NamedTuple):
    """One stored tensor: its type, shape, and the half-open byte range ``[offset, offset + nbytes)``."""

    name: str
    dtype: str  # a key of DTYPE_BITS
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True)
class WeightsFile:
    """What one weights file holds: tensors in file order, and every other byte of it (``frame``)."""

    name: str  # posix path relative to the checkpoint's root
    size: int
    format: str  # "safetensors" or "torch"
    tensors: tuple[TensorInfo, ...]  # by offset; ties in header order
    metadata: Mapping[str, str]
    aliases: Mapping[str, str]  # another name -> the name in `tensors` whose bytes it shares
    frame: Frame


def read_exactly(read: Read, offset: int, nbytes: int, name: str, size: int) -> bytes:
    """Read ``nbytes`` bytes at ``offset``; fewer raise :class:`DamagedError` with both sizes."""
    got = read(offset, nbytes)
    if len(got) != nbytes:
        raise DamagedError(
            f"{name} ends at byte {offset + len(got):,} while bytes {offset:,} to {offset + nbytes:,} were read "
            f"(it had {size:,} bytes when it was opened): it is cut short or still being written. {_AGAIN}"
        )
    return got


def read_header(read: Read, size: int, name: str) -> WeightsFile:
    """Read and validate the header of a safetensors file of ``size`` bytes.

    Checked: the length prefix against ``size`` and the reference's limit of 100,000,000 bytes; UTF-8
    JSON, an object, no key twice; ``__metadata__`` from strings to strings; each dtype known; each
    dimension an integer in ``[0, 2**63)`` and their product below it; each byte range of exactly the
    size that dtype and shape give; the ranges, sorted, without overlap or hole from the end of the
    header to the end of the file. Anything else raises :class:`DamagedError`.
    """
    if size < 8:
        raise DamagedError(f"{name} has {size:,} bytes, too few for a safetensors file. {_AGAIN}")
    prefix = read_exactly(read, 0, 8, name, size)
    length = int.from_bytes(prefix, "little")
    if length > size - 8 or length > MAX_HEADER_BYTES:
        if prefix.startswith(b"version "):
            raise DamagedError(
                f"{name} is a Git LFS pointer, not the weights themselves. Fetch them with `git lfs pull`."
            )
        raise DamagedError(
            f"{name} claims a header of {length:,} bytes, but the file has {size:,} bytes and the format allows "
            f"{MAX_HEADER_BYTES:,}: it is cut short or not a safetensors file. {_AGAIN}"
        )
    raw = read_exactly(read, 8, length, name, size)
    if raw[:1] != b"{":
        raise DamagedError(f"{name}: the header begins with {raw[:1]!r}, not with '{{'. {_AGAIN}")
    parsed = parse_object(raw, f"{name}: the header", _AGAIN)
    metadata = _metadata(parsed.pop("__metadata__", None), name)
    start = 8 + length
    tensors = _tensors(parsed, start, name)
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    _check_cover(tensors, start, size, name)
    return WeightsFile(name, size, "safetensors", tuple(tensors), metadata, {}, ((0, prefix + raw),))


def _metadata(found: object, name: str) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise DamagedError(f"{name}: __metadata__ is a {type(found).__name__}, not an object. {_AGAIN}")
    for key, value in found.items():
        if type(value) is not str:
            raise DamagedError(
                f"{name}: __metadata__ maps {key!r:.200} to a {type(value).__name__}, not a string. {_AGAIN}"
            )
    return found


def check_tensor_name(tensor: str, name: str) -> None:
    """Refuse the empty name and names with NUL or a line break, which no later file could carry."""
    if not tensor or "\0" in tensor or "\n" in tensor or "\r" in tensor:
        raise DamagedError(
            f"{name} holds a tensor named {tensor!r:.200}; a name may not be empty or contain NUL or a line break. "
            "Rename it and save the checkpoint again."
        )


def _tensors(parsed: dict[str, Any], start: int, name: str) -> list[TensorInfo]:
    tensors: list[TensorInfo] = []
    append = tensors.append
    bits_of = DTYPE_BITS.get
    for tensor, entry in parsed.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise DamagedError(
                f"{name}: the header entry of {tensor!r:.200} is not an object with dtype, shape and two data_offsets. "
                f"{_AGAIN}"
            ) from None
        bits = bits_of(dtype) if type(dtype) is str else None
        if bits is None:
            raise DamagedError(
                f"{name}: {tensor!r:.200} has the dtype {dtype!r:.60}; known are {', '.join(DTYPE_BITS)}. "
                "Save it in one of these, or download the file again."
            )
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < _LIMIT:
            raise DamagedError(f"{name}: {tensor!r:.200} has data_offsets {begin!r:.60}, {end!r:.60}. {_AGAIN}")
        if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
            raise DamagedError(
                f"{name}: the shape of {tensor!r:.200} is not a list of at most {MAX_DIMENSIONS} dimensions. {_AGAIN}"
            )
        elements = 1
        for dimension in shape:
            if type(dimension) is not int or not 0 <= dimension < _LIMIT:
                raise DamagedError(f"{name}: {tensor!r:.200} has a dimension of {dimension!r:.60}. {_AGAIN}")
            elements *= dimension
        if elements >= _LIMIT or elements * bits != (end - begin) * 8:
            raise DamagedError(
                f"{name}: {tensor!r:.200} is {dtype} of shape {shape!r:.200}, {_bytes(elements * bits)} bytes, but its "
                f"data_offsets give it {end - begin:,}. {_AGAIN}"
            )
        check_tensor_name(tensor, name)
        append(TensorInfo(tensor, dtype, tuple(shape), start + begin, end - begin))
    return tensors


def _bytes(bits: int) -> str:
    return f"{bits // 8:,}" if bits % 8 == 0 else f"{bits // 8:,} and {bits % 8}/8"


def _check_cover(tensors: Sequence[TensorInfo], start: int, size: int, name: str) -> None:
    at = start
    before = "the header"
    for info in tensors:
        if info.offset != at:
            fault = "overlaps" if info.offset < at else "leaves a hole after"
            raise DamagedError(
                f"{name}: {info.name!r:.200} begins at byte {info.offset:,} and {fault} {before}, which ends at byte "
                f"{at:,}. {_AGAIN}"
            )
        at += info.nbytes
        before = f"{info.name!r:.200}"
    if at != size:
        fault = "it is cut short" if at > size else f"{size - at:,} bytes follow that belong to no tensor"
        raise DamagedError(
            f"{name}: by its header the data ends at byte {at:,}, but the file has {size:,} bytes: {fault}. {_AGAIN}"
        )


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; :class:`UnsupportedError` for an unknown dtype or a number of bits that fills no byte."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise UnsupportedError(f"safetensors has no dtype {dtype!r:.60}; it has {', '.join(DTYPE_BITS)}.")
    for dimension in shape:
        bits *= dimension
    if bits % 8:
        raise UnsupportedError(
            f"{dtype} of shape {list(shape)} is {bits:,} bits, not a whole number of bytes. Choose a degree that "
            "cuts it at a byte."
        )
    return bits // 8


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None, align: int = 8
) -> bytes:
    """The first bytes of a safetensors file whose data follows in the order given, without holes.

    ``tensors`` are ``(name, dtype, shape)``. The result is the length prefix, compact JSON, and spaces
    up to a multiple of ``align`` bytes, where the data begins. At ``align`` 8 it is byte for byte what
    the reference implementation writes for the same order and metadata (``prepare`` in ``tensor.rs``);
    no ``__metadata__`` is written where ``metadata`` is None. :class:`UnsupportedError` for a tensor
    that safetensors cannot hold, a name given twice, or a header over the format's 100,000,000 bytes.
    """
    entries: dict[str, Any] = {}
    if metadata is not None:
        entries["__metadata__"] = dict(metadata)
    count = len(entries)
    at = 0
    for name, dtype, shape in tensors:
        end = at + tensor_nbytes(dtype, shape)
        if name == "__metadata__":
            raise UnsupportedError("A tensor may not be named '__metadata__' in safetensors. Rename it.")
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}
        at = end
    if len(entries) != count + len(tensors):
        raise UnsupportedError(_twice(tensors))
    raw = json.dumps(entries, ensure_ascii=False, separators=(",", ":"), check_circular=False).encode("utf-8")
    length = -(-(8 + len(raw)) // align) * align - 8
    if length > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"The header for {len(tensors):,} tensors has {length:,} bytes; safetensors allows {MAX_HEADER_BYTES:,}. "
            "Write them to several files with a size limit."
        )
    return length.to_bytes(8, "little") + raw + b" " * (length - len(raw))


def _twice(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> str:
    seen: set[str] = set()
    for name, _, _ in tensors:
        if name in seen:
            break
        seen.add(name)
    return f"The tensor {name!r:.200} was given twice for one file."


def frame_reader(frame: Frame, name: str) -> Read:
    """``read`` over a frame alone, as if the file were there; :class:`DamagedError` for bytes that it lacks."""

    def read(offset: int, nbytes: int) -> bytes:
        at = bisect_right(frame, offset, key=lambda piece: piece[0]) - 1
        if at >= 0:
            begin, held = frame[at]
            found = held[offset - begin : offset - begin + nbytes]
            if len(found) == nbytes:
                return found
        raise DamagedError(
            f"{name}: bytes {offset:,} to {offset + nbytes:,} were asked for, which the recorded frame does not hold. "
            "Split the source again."
        )

    return read
