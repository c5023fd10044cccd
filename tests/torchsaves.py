"""Files of torch.save for the tests, whole and doctored."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import pytest

from tpshard.errors import TpshardError
from tpshard.header import Read, WeightsFile, frame_reader
from tpshard.torchfile import read_torch

torch = pytest.importorskip("torch")


def reader(data: bytes) -> Read:
    return lambda offset, nbytes: data[offset : offset + nbytes]


def parse(data: bytes) -> WeightsFile:
    return read_torch(reader(data), len(data), "pytorch_model.bin")


def saved(state: object, *, legacy: bool = False, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=not legacy, **options)
    return buffer.getvalue()


def raw_bytes(tensor: Any) -> bytes:
    tensor = tensor.detach().contiguous()
    return bytes(tensor.flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def rezipped(data: bytes, change: dict[str, bytes | None], **options: Any) -> bytes:
    """The archive again, with entries (names without their folder) replaced or, for None, left out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", **options) as new:
        for info in old.infolist():
            content = change.get(info.filename.split("/", 1)[1], old.read(info))
            if content is not None:
                new.writestr(info.filename, content)
    return buffer.getvalue()


PLAIN = saved({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.float16)})
PLAIN_LEGACY = saved({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.float16)}, legacy=True)


def framed(pickled: bytes, *, legacy: bool) -> bytes:
    """A file of torch.save whose state dict is the pickle ``pickled``."""
    if legacy:
        heads = b"".join(
            pickle.dumps(part, 2)
            for part in (
                0x1950A86A20F9469CFC6C,
                1001,
                {"protocol_version": 1001, "little_endian": True, "type_sizes": {}},
            )
        )
        return heads + pickled + pickle.dumps([], 2)
    return rezipped(PLAIN, {"data.pkl": pickled})


def outcome(data: bytes) -> None:
    try:
        found = parse(data)
    except TpshardError:
        return
    assert sum(t.nbytes for t in found.tensors) + sum(len(held) for _, held in found.frame) == len(data)
    assert read_torch(frame_reader(found.frame, "x"), len(data), found.name) == found
