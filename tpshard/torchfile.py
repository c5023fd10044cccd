"""``pytorch_model.bin``: where a state dict's tensors lie, found without torch and without executing anything.

Two formats (``torch/serialization.py``): the zip archive of torch 1.6 and later, whose ``data.pkl``
names storages that are entries of their own; and the older sequence of five pickles, followed by each
storage as a 64-bit count of elements and its data. The pickles go through
:mod:`tpshard.inertpickle`. Only bytes that are no tensor data are read, so a file's frame can be read
again in place of the file. Offsets are bytes; ranges are half-open.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import NoReturn

from tpshard.errors import DamagedError, UnsupportedError
from tpshard.header import DTYPE_BITS, Frame, Read, TensorInfo, WeightsFile, check_tensor_name, read_exactly
from tpshard.inertpickle import MAX_BYTES, load
from tpshard.torchstate import Storage, View, storage_of, torch_globals
from tpshard.torchzip import Archive

MAX_FRAME_BYTES = 64 << 20
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_AGAIN = "Download or copy the file again."
_SAVE = "Load the model with transformers and save it with save_pretrained, which writes safetensors."


def read_torch(read: Read, size: int, name: str, within: str | None = None) -> WeightsFile:
    """Find the tensors of a ``pytorch_model.bin`` of ``size`` bytes.

    The pickle must hold one mapping from names to contiguous tensors. Two names of one and the same
    view become an alias (the first name stays); bytes of a storage that no tensor uses belong to the
    frame. :class:`UnsupportedError` for anything but tensors (nothing of it is executed), views that
    are not contiguous or overlap in part, compressed entries, the tar format before torch 0.1.10, and
    a frame over 64 MiB; :class:`DamagedError` for what is cut short or contradicts itself.

    With ``within`` (an engine's file) the tensors are those of the mapping under that key, or for "" of the whole one;
    everything else is skipped, whatever it is, nothing of it is executed, and the frame is empty.
    """
    touched: list[tuple[int, int]] = []

    def noted(offset: int, nbytes: int) -> bytes:
        touched.append((offset, offset + nbytes))
        return read(offset, nbytes)

    start = read_exactly(noted, 0, min(size, 4), name, size)
    if start.startswith(b"PK\3\4"):
        state, storages = _read_zip(noted, size, name, within is not None)
    elif start[:1] == b"\x80":
        state, storages = _read_legacy(noted, size, name)
    else:
        _refuse_other(read, size, name)
    if within is not None:
        state = _tensors_in(state, within, name)
    tensors, aliases = _place(state, storages, name)
    if within is not None:
        _check_untouched(tensors, touched, name)
        return WeightsFile(name, size, "torch", tensors, {}, aliases, ())
    return WeightsFile(name, size, "torch", tensors, {}, aliases, _frame(read, size, name, tensors, touched))


def read_tensor(read: Read, at: int, nbytes: int, name: str) -> TensorInfo:
    """Find the tensor of a file of ``torch.save`` that lies at byte ``at`` of another file and holds nothing else.

    Raises as :func:`read_torch`; the offset is that in the file around it.
    """
    state, storages = _read_zip(lambda offset, count: read(at + offset, count), nbytes, name, True)
    if not isinstance(state, View):
        raise UnsupportedError(f"{name} holds no tensor where one is promised, at byte {at:,}")
    info = _locate(name, state, storages, name)
    return info._replace(offset=at + info.offset)


def _tensors_in(state: object, within: str, name: str) -> dict[str, View]:
    """The tensors of a mapping inside a mapping; what else is there is left."""
    if within and isinstance(state, dict):
        held = ", ".join(str(key) for key in list(state)[:8])
        state = state.get(within)
        if not isinstance(state, dict):
            raise UnsupportedError(f"{name} holds no mapping {within!r} of tensors, only {held:.200}")
    if not isinstance(state, dict):
        raise UnsupportedError(f"{name} holds no mapping of tensors")
    return {key: value for key, value in state.items() if type(key) is str and isinstance(value, View)}


def _refuse_other(read: Read, size: int, name: str) -> NoReturn:
    head = read(0, min(size, 512))
    if head[257:262] == b"ustar":
        raise UnsupportedError(f"{name} is in the tar format of torch before 0.1.10, which is not read. {_SAVE}")
    if head.startswith(b"version "):
        raise DamagedError(f"{name} is a Git LFS pointer, not the weights themselves. Fetch them with `git lfs pull`.")
    raise DamagedError(f"{name} ({size:,} bytes, beginning with {head[:8]!r}) is not a file of torch.save. {_AGAIN}")


def _read_zip(read: Read, size: int, name: str, skip: bool) -> tuple[object, dict[str, tuple[int, int]]]:
    archive = Archive(read, size, name)
    pickles = [entry for entry in archive.entries if entry.endswith("/data.pkl") and entry.count("/") == 1]
    if len(pickles) != 1:
        raise DamagedError(f"{name} is a zip archive without a data.pkl: not a file of torch.save. {_AGAIN}")
    folder = pickles[0][: -len("data.pkl")]
    if folder + "constants.pkl" in archive.entries:
        raise UnsupportedError(f"{name} is a TorchScript archive, which is code, not weights. {_SAVE}")
    order = archive.entries.get(folder + "byteorder")
    if order is not None:
        value = read_exactly(read, archive.locate(order), min(order.nbytes, 16), name, size)
        if value != b"little":
            raise UnsupportedError(f"{name} was written in the byte order {value!r}; only b'little' is read. {_SAVE}")
    entry = archive.entries[pickles[0]]
    if entry.nbytes > MAX_BYTES:
        raise UnsupportedError(
            f"{name}: its data.pkl has {entry.nbytes:,} bytes, more than the {MAX_BYTES:,} of any state dict. {_SAVE}"
        )
    raw = read_exactly(read, archive.locate(entry), entry.nbytes, name, size)
    named: dict[str, Storage] = {}

    def persistent(found: object) -> Storage:
        storage = storage_of(found)
        return named.setdefault(storage.key + "/" + storage.dtype, storage)

    state = load(io.BytesIO(raw).read, torch_globals(), persistent, name, skip=skip)
    storages: dict[str, tuple[int, int]] = {}
    for storage in named.values():
        data = archive.entries.get(f"{folder}data/{storage.key}")
        if data is None:
            raise DamagedError(
                f"{name} has no entry data/{storage.key:.100} for a storage that a tensor uses. {_AGAIN}"
            )
        if data.nbytes != storage.nbytes:
            raise DamagedError(
                f"{name}: the storage {storage.key:.100} has {data.nbytes:,} bytes, but its tensors expect "
                f"{storage.nbytes:,}. {_AGAIN}"
            )
        if storage.key not in storages:
            storages[storage.key] = archive.locate(data), data.nbytes
    return state, storages


def _read_legacy(read: Read, size: int, name: str) -> tuple[object, dict[str, tuple[int, int]]]:
    at = 0

    def take(nbytes: int) -> bytes:
        nonlocal at
        found = read(at, nbytes) if at + nbytes <= size else b""
        at += len(found)
        return found

    named: dict[str, Storage] = {}

    def persistent(found: object) -> Storage:
        storage = storage_of(found)
        if named.setdefault(storage.key, storage) != storage:
            raise ValueError("one storage with two types or sizes")
        return storage

    def none(found: object) -> NoReturn:
        raise ValueError("a persistent id outside the state dict")

    magic = load(take, {}, none, name)
    protocol = load(take, {}, none, name) if magic == _LEGACY_MAGIC else None
    if magic != _LEGACY_MAGIC or protocol != _LEGACY_PROTOCOL:
        raise DamagedError(f"{name} is a pickle, but not a file of torch.save. {_AGAIN}")
    system = load(take, {}, none, name)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise UnsupportedError(f"{name} was not written in little-endian byte order; only that is read. {_SAVE}")
    state = load(take, torch_globals(), persistent, name)
    keys = load(take, {}, none, name)
    if not isinstance(keys, list) or not all(type(key) is str for key in keys) or sorted(keys) != sorted(named):
        raise DamagedError(f"{name}: the list of its storages does not match those of its tensors. {_AGAIN}")
    storages: dict[str, tuple[int, int]] = {}
    for key in keys:
        storage = named[key]
        itemsize = DTYPE_BITS[storage.dtype] // 8
        elements = int.from_bytes(read_exactly(read, at, 8, name, size), "little", signed=True)
        at += 8
        if elements * itemsize != storage.nbytes or at + storage.nbytes > size:
            raise DamagedError(
                f"{name}: a storage of {storage.nbytes:,} bytes at byte {at:,} is said to have {elements:,} elements "
                f"of {itemsize}, in a file of {size:,} bytes. {_AGAIN}"
            )
        storages[key] = at, storage.nbytes
        at += storage.nbytes
    if at != size:
        raise DamagedError(f"{name}: its storages end at byte {at:,}, but the file has {size:,} bytes. {_AGAIN}")
    return state, storages


def _place(
    state: object, storages: Mapping[str, tuple[int, int]], name: str
) -> tuple[tuple[TensorInfo, ...], dict[str, str]]:
    """The tensors by offset, and the names that share another tensor's view."""
    if not isinstance(state, dict):
        raise UnsupportedError(f"{name} holds a {type(state).__name__.strip('_')}, not a mapping of tensors. {_SAVE}")
    tensors: list[TensorInfo] = []
    aliases: dict[str, str] = {}
    holders: dict[tuple[str, tuple[int, ...], int], str] = {}
    for key, view in state.items():
        if type(key) is not str or not isinstance(view, View):
            what = f"a {type(view).__name__}" if not isinstance(view, View) else "a tensor"
            raise UnsupportedError(
                f"{name} maps {key!r:.200} to {what}; a state dict maps names to tensors. Take the model's state "
                "dict out of it where it is trusted, and save that as safetensors."
            )
        check_tensor_name(key, name)
        info = _locate(key, view, storages, name)
        first = holders.setdefault((info.dtype, info.shape, info.offset), key) if info.nbytes else key
        if first == key:
            tensors.append(info)
        else:
            aliases[key] = first
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    end, before = 0, ""
    for info in tensors:
        if info.nbytes and info.offset < end:
            raise UnsupportedError(
                f"{name}: {info.name!r:.200} and {before!r:.200} share a part of their bytes, up to byte {end:,}. "
                f"{_SAVE}"
            )
        if info.nbytes:
            end, before = info.offset + info.nbytes, info.name
    return tuple(tensors), aliases


def _locate(key: str, view: View, storages: Mapping[str, tuple[int, int]], name: str) -> TensorInfo:
    elements = 1
    contiguous = True
    for dimension, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        contiguous = contiguous and (dimension == 1 or stride == elements)
        elements *= dimension
    itemsize = DTYPE_BITS[view.dtype] // 8
    begin, nbytes = storages[view.storage.key]
    if elements == 0:
        return TensorInfo(key, view.dtype, view.shape, begin, 0)
    if not contiguous:
        raise UnsupportedError(
            f"{name}: {key!r:.200} of shape {list(view.shape)} is stored with the strides {list(view.stride)}, "
            f"not contiguously. {_SAVE}"
        )
    if (view.offset + elements) * itemsize > nbytes:
        raise DamagedError(
            f"{name}: {key!r:.200} of shape {list(view.shape)} ends at byte {(view.offset + elements) * itemsize:,} of "
            f"a storage of {nbytes:,} bytes. {_AGAIN}"
        )
    return TensorInfo(key, view.dtype, view.shape, begin + view.offset * itemsize, elements * itemsize)


def _frame(read: Read, size: int, name: str, tensors: tuple[TensorInfo, ...], touched: list[tuple[int, int]]) -> Frame:
    """Every byte outside the tensors; the ranges that were read to find them must be among these."""
    gaps: list[tuple[int, int]] = []
    at = 0
    for info in tensors:
        if info.nbytes:
            if info.offset > at:
                gaps.append((at, info.offset - at))
            at = info.offset + info.nbytes
    if size > at:
        gaps.append((at, size - at))
    total = sum(nbytes for _, nbytes in gaps)
    if total > MAX_FRAME_BYTES:
        raise UnsupportedError(
            f"{name}: {total:,} of its {size:,} bytes belong to no tensor (at most {MAX_FRAME_BYTES:,} are carried). "
            f"{_SAVE}"
        )
    _check_untouched(tensors, touched, name)
    return tuple((offset, read_exactly(read, offset, nbytes, name, size)) for offset, nbytes in gaps)


def _check_untouched(tensors: tuple[TensorInfo, ...], touched: list[tuple[int, int]], name: str) -> None:
    touched.sort()
    reads = iter(touched)
    begin, end = next(reads)
    for info in tensors:
        if info.nbytes == 0:
            continue
        while end <= info.offset:
            found = next(reads, None)
            if found is None:
                return
            begin, end = found[0], max(end, found[1])
        if begin < info.offset + info.nbytes:
            raise DamagedError(
                f"{name}: {info.name!r:.200} lies at byte {info.offset:,}, in the midst of what says where it "
                f"lies. {_AGAIN}"
            )
