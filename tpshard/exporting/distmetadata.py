"""The ``.metadata`` of a torch distributed checkpoint: which chunks of which tensors lie where in its files.

It is a pickle of torch's own classes (``torch/distributed/checkpoint/metadata.py``, ``filesystem.py``). Here it is
written as they pickle themselves and read as plain data, both without torch: importing torch alone takes more memory
than moving the tensors does.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpshard.errors import DamagedError
from tpshard.inertpickle import Function, Kind, Record, load
from tpshard.torchstate import torch_dtypes

from .torchpickle import Built, Called, Global, pickled

_METADATA = "torch.distributed.checkpoint.metadata"
_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")


class Chunk(NamedTuple):
    """A rectangle of a tensor, and the bytes of the file that are the saved rectangle; all in elements and bytes."""

    origin: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class GlobalTensor(NamedTuple):
    """A tensor of a distributed checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]


def written(tensors: Mapping[str, GlobalTensor]) -> bytes:
    """The bytes of ``.metadata``."""
    held = {name: _tensor(tensor) for name, tensor in tensors.items()}
    where: list[tuple[object, object]] = []
    for name, tensor in tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            index = {"fqn": name, "index": number, "offset": _size(chunk.origin)}
            place = {"relative_path": chunk.file, "offset": chunk.offset, "length": chunk.nbytes}
            where.append((Built(Global(_METADATA, "MetadataIndex"), index), Built(_INFO, place)))
    state = {
        "state_dict_metadata": held, "planner_data": None, "storage_data": Pairs(where), "storage_meta": None,
        "version": "1.0.0",
    }  # fmt: skip
    return pickled(Built(Global(_METADATA, "Metadata"), state))


class Pairs(Mapping[object, object]):
    """Keys and values in their order, for a pickle; keys need not be hashable."""

    def __init__(self, pairs: Sequence[tuple[object, object]]) -> None:
        self._pairs = pairs

    def __getitem__(self, key: object) -> object:
        return next(value for own, value in self._pairs if own == key)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return (key for key, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def items(self):  # type: ignore[no-untyped-def]
        return self._pairs


def _size(shape: Sequence[int]) -> Called:
    return Called(Global("torch", "Size"), (tuple(shape),))


def _tensor(tensor: GlobalTensor) -> Built:
    contiguous = Called(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    strided = Called(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    properties = (Global("torch", torch_dtypes()[tensor.dtype]), strided, False, contiguous, False)
    chunks = [
        Built(Global(_METADATA, "ChunkStorageMetadata"), {"offsets": _size(c.origin), "sizes": _size(c.shape)})
        for c in tensor.chunks
    ]
    state = {
        "properties": Built(Global(_METADATA, "TensorProperties"), properties), "size": _size(tensor.shape),
        "chunks": chunks,
    }  # fmt: skip
    return Built(Global(_METADATA, "TensorStorageMetadata"), state)


def read(data: bytes, name: str) -> dict[str, GlobalTensor]:
    """The tensors that ``.metadata`` names; bytes that are no tensors (``_extra_state``) are left out.

    Raises:
        DamagedError: it is no such pickle, or contradicts itself.
    """
    kinds = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
             "MetadataIndex")  # fmt: skip
    known: dict[str, object] = {f"{_METADATA}.{kind}": Kind(kind) for kind in kinds}
    known[f"{_INFO.module}.{_INFO.name}"] = Kind("_StorageInfo")
    known["torch.Size"] = Function(_as_size)
    known |= {f"torch.{torch}": dtype for dtype, torch in torch_dtypes().items()}

    def none(found: object) -> object:
        raise ValueError("a storage in the metadata")

    whole = load(io.BytesIO(data).read, known, none, name, skip=True, times=32)
    try:
        state = _state(whole, "Metadata")
        places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
        for key, info in state["storage_data"].items():
            index, place = _state(key, "MetadataIndex"), _state(info, "_StorageInfo")
            if index.get("offset") is not None:
                places[index["fqn"], index["offset"]] = place["relative_path"], place["offset"], place["length"]
        found = {}
        for fqn, held in state["state_dict_metadata"].items():
            if not isinstance(held, Record) or held.kind.name != "TensorStorageMetadata":
                continue
            tensor = _state(held, "TensorStorageMetadata")
            chunks = []
            for one in tensor["chunks"]:
                box = _state(one, "ChunkStorageMetadata")
                chunks.append(Chunk(box["offsets"], box["sizes"], *places[fqn, box["offsets"]]))
            dtype = tensor["properties"].state[0]
            found[fqn] = GlobalTensor(dtype if isinstance(dtype, str) else "", tensor["size"], chunks)
        return found
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedError(
            f"{name} is not the metadata of a distributed checkpoint of torch, or contradicts itself "
            f"({type(error).__name__}: {str(error)[:120]}); copy it again"
        ) from None


def _as_size(value: object = ()) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(one) is int and one >= 0 for one in value):
        raise TypeError("a torch.Size of other things than numbers")
    return tuple(value)


def _state(value: object, kind: str) -> dict:  # type: ignore[type-arg]
    if not isinstance(value, Record) or value.kind.name != kind or not isinstance(value.state, dict):
        raise TypeError(f"no {kind} where one belongs")
    return value.state
