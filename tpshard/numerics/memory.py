"""Keeps memory low while many threads take turns."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1  # malloc.h of glibc
_LARGE = 1 << 20  # bytes from which an allocation is given back to the system when freed


class Scratch:
    """Buffers for one tile as stored and one as converted, shared by all participants: one runs at a time."""

    def __init__(self) -> None:
        self._stored = torch.empty(0, dtype=torch.uint8)
        self._converted: dict[torch.dtype, torch.Tensor] = {}

    def stored(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes, until the next call."""
        if self._stored.numel() < nbytes:
            self._stored = torch.empty(0, dtype=torch.uint8)
            self._stored = torch.empty(nbytes, dtype=torch.uint8)
        return self._stored[:nbytes]

    def converted(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``count`` elements, until the next call."""
        held = self._converted.get(dtype)
        if held is None or held.numel() < count:
            self._converted[dtype] = torch.empty(0, dtype=dtype)
            held = self._converted[dtype] = torch.empty(count, dtype=dtype)
        return held[:count]


def share_one_heap() -> None:
    """Make all threads allocate from one heap and give large blocks back when freed; glibc only, else nothing.

    By default every thread keeps a heap of its own, which costs N ranks N times what they hold at a time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE)


def peak_bytes() -> int:
    """The largest resident memory of this process so far; 0 where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 0
