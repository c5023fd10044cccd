"""The weights files of a source as ``tpshard.json`` keeps them: name, size, and every byte that is no tensor data."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass

from .errors import DamagedError
from .fields import Fields
from .header import Frame, WeightsFile, frame_reader, read_header
from .torchfile import read_torch

LONGEST_NAME = 255  # bytes of one part of a path, on every file system in use
LARGEST_FRAME = 1 << 28  # bytes of all headers of a source together


@dataclass(frozen=True)
class SourceFile:
    """A weights file of the source: every byte of it that is not tensor data is kept in ``frame``.

    ``rebuilt`` marks a file whose header was written anew because it also held a stale tensor.
    """

    name: str
    size: int
    format: str
    frame: Frame
    rebuilt: bool = False


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def parse_source_files(item: Fields) -> tuple[SourceFile, ...]:
    files: list[SourceFile] = []
    left = LARGEST_FRAME
    for file in item.items():
        size = file["size"].whole()
        frame: list[tuple[int, bytes]] = []
        for part in file["frame"].items():
            data = unpacked(part["bytes"], min(size, left))
            left -= len(data)
            frame.append((part["at"].whole(0, size), data))
        name, form = plain_name(file["name"]), file["format"].text()
        files.append(SourceFile(name, size, form, tuple(frame), file["rebuilt"].flag()))
    return tuple(files)


def unpacked(item: Fields, limit: int) -> bytes:
    """The bytes of a packed field, never more than ``limit`` however they were packed."""
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(item.text(), validate=True), limit + 1)
    except (ValueError, zlib.error):
        item.wrong("does not unpack")
    if len(data) > limit or not inflate.eof:
        item.wrong(f"unpacks to more than {limit} bytes")
    return data


def plain_name(item: Fields) -> str:
    """A relative path that stays inside the directory."""
    name = item.text()
    parts = name.split("/")
    outside = any(part in ("", ".", "..") or len(part.encode("utf-8", "replace")) > LONGEST_NAME for part in parts)
    if outside or "\\" in name or "\0" in name:
        item.wrong(f"is {name[:80]!r}, not a plain path inside the directory")
    return name


def reread(file: SourceFile, where: str) -> WeightsFile:
    """Parse a source file's header again, from the bytes that the manifest keeps of it.

    Raises:
        DamagedError: the bytes are not those of a weights file.
    """
    reader = {"safetensors": read_header, "torch": read_torch}.get(file.format)
    if reader is None:
        raise DamagedError(
            f"{where}: source file {file.name} has the unknown format {file.format!r:.80}; "
            "copy the directory again, or split again"
        )
    return reader(frame_reader(file.frame, file.name), file.size, file.name)
