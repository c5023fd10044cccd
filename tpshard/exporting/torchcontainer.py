"""Files of ``torch.save`` whose tensors' bytes are moved in by a plan: everything else of them, made beforehand.

The format is the zip archive of torch 1.6 and later, laid as torch's writer lays it (``caffe2/serialize/
inline_container.cc`` and its miniz): entries stored plainly, their data at multiples of 64 bytes by a padding field
``FB`` in the local header, sizes in a descriptor behind the data, 64-bit records where 32 bits are too few. Offsets
are therefore those that ``torch.utils.serialization.config.load.calculate_storage_offsets`` computes, and files can
be mapped (``torch.load(mmap=True)``).

The checksum of a tensor's entry is zero, as in the files that torch writes after
``torch.serialization.set_crc32_options(False)``: it is known only when all bytes have passed, it would cost more than
the copy, and torch's reader is built without checking it (``MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS``). Entries whose
bytes are known have theirs. Digests are tpshard's business, not this format's.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpshard.errors import UnsupportedError, short
from tpshard.header import Frame

from .torchpickle import DTYPES, TensorAt, pickled

ALIGN = 64
_MOST32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_FLAGS_NAME, _FLAGS_DESCRIPTOR = 0x0800, 0x0808  # UTF-8 names; and sizes behind the data


class TensorSpec(NamedTuple):
    """A tensor that the file holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class TorchFile(NamedTuple):
    """A file without its tensors' bytes: the frame, where each of the tensors lies, and the file's size."""

    frame: Frame
    offsets: tuple[int, ...]
    size: int


def torch_file(
    tensors: Sequence[TensorSpec], folder: str, *, within: str = "", around: Mapping[str, object] | None = None,
    at: int = 0,
) -> TorchFile:  # fmt: skip
    """A file that holds a mapping from names to tensors.

    Args:
        tensors: in their order, each of a storage of its own.
        folder: what torch puts before the names of entries: the file's name without its suffix.
        within: the key of the mapping in the mapping that is saved; "": it is that itself.
        around: what else is saved beside it.
        at: where the archive begins, for several in one file; offsets count from the beginning of that file.

    Raises:
        UnsupportedError: torch has no dtype for one of them.
    """
    entries = {spec.name: _tensor(spec, str(number)) for number, spec in enumerate(tensors)}
    state: object = {**(around or {}), **({within: entries} if within else entries)}
    return _archive(folder, pickled(state), tensors, at)


def torch_tensor(tensor: TensorSpec, folder: str = "archive", at: int = 0) -> TorchFile:
    """A file that holds one tensor and no mapping; as :func:`torch_file`."""
    return _archive(folder, pickled(_tensor(tensor, "0")), [tensor], at)


def _tensor(spec: TensorSpec, key: str) -> TensorAt:
    if spec.dtype not in DTYPES:
        raise UnsupportedError(f"{short(spec.name)} is {spec.dtype}, for which torch.save has no type")
    return TensorAt(key, spec.dtype, spec.shape, spec.nbytes)


def _archive(folder: str, pickle: bytes, tensors: Sequence[TensorSpec], at: int) -> TorchFile:
    archive = _Archive(folder, at)
    archive.known("data.pkl", pickle)
    archive.known(".format_version", b"1")
    archive.known(".storage_alignment", str(ALIGN).encode())
    archive.known("byteorder", b"little")
    offsets = tuple([archive.moved(f"data/{number}", spec.nbytes) for number, spec in enumerate(tensors)])
    archive.known("version", b"3\n")
    return archive.closed(offsets)


class _Archive:
    """An archive as it grows: what of it is known is collected run by run."""

    def __init__(self, folder: str, at: int) -> None:
        self._folder, self._start = folder, at
        self._runs: list[tuple[int, bytearray]] = [(at, bytearray())]
        self._central = bytearray()
        self._count = 0

    @property
    def _at(self) -> int:
        """Where the next byte is to lie."""
        start, data = self._runs[-1]
        return start + len(data)

    def known(self, name: str, data: bytes) -> None:
        """Add an entry with these bytes."""
        _, close = self._opened(name, len(data), zlib.crc32(data))
        self._runs[-1][1].extend(data + close)

    def moved(self, name: str, nbytes: int) -> int:
        """Add an entry whose bytes are moved in; returns where they belong."""
        begin, close = self._opened(name, nbytes, 0)
        self._runs.append((begin + nbytes, bytearray(close)))
        return begin

    def _opened(self, name: str, nbytes: int, crc: int) -> tuple[int, bytes]:
        """Lay a local header and list it in the directory; returns where the data begins, and what follows it."""
        header_at = self._at - self._start
        path = f"{self._folder}/{name}".encode()
        wide = b"".join(
            [struct.pack("<2Q", nbytes, nbytes)] * (nbytes >= _MOST32)
            + [struct.pack("<Q", header_at)] * (header_at >= _MOST32)
        )
        extra = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
        begin = header_at + _LOCAL.size + len(path) + len(extra) + 4
        padding = -begin % ALIGN
        flags = _FLAGS_DESCRIPTOR if nbytes else _FLAGS_NAME
        packed = min(nbytes, _MOST32)
        self._runs[-1][1].extend(
            _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra) + 4 + padding)
            + path + extra + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        )  # fmt: skip
        self._central += (
            _CENTRAL.pack(
                b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, packed, packed, len(path), len(extra), 0, 0, 0, 0,
                min(header_at, _MOST32),
            ) + path + extra
        )  # fmt: skip
        self._count += 1
        close = b""
        if nbytes:
            close = struct.pack("<4sL2Q" if wide else "<4s3L", b"PK\7\10", crc, nbytes, nbytes)
        return self._start + begin + padding, close

    def closed(self, offsets: tuple[int, ...]) -> TorchFile:
        """End the archive with its directory."""
        directory_at, count, nbytes = self._at - self._start, self._count, len(self._central)
        end_at = directory_at + nbytes
        self._runs[-1][1].extend(
            self._central
            + struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, nbytes, directory_at)
            + struct.pack("<4sLQL", b"PK\6\7", 0, end_at, 1)
            + struct.pack(
                "<4s4H2LH", b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), min(nbytes, _MOST32),
                min(directory_at, _MOST32), 0,
            )
        )  # fmt: skip
        return TorchFile(tuple((at, bytes(data)) for at, data in self._runs if data), offsets, self._at)
