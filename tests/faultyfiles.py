"""A layer over the calls by which tpshard touches files, in which any of them can fail, be cut short, or be the last.

``os.pwrite`` and its like are replaced by ones that count. A *death* is what a SIGKILL or a power cut is to the
disk: the call that it falls on has half of its effect, and none after it has any, so that whatever the process
does while it unwinds leaves no trace. Locks are released by closing, as the kernel does it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tpshard import openfiles, publish

WRITING = ("pwrite", "write", "ftruncate", "mkdir", "unlink", "remove", "rmdir", "rename", "replace", "chmod", "link")
READING = ("preadv", "pread", "read")

Fault = Callable[[str, int, tuple[Any, ...]], None]
"""``fault(call, number, arguments)``: raises what is to go wrong in the call with that number, counted from 0."""


class Killed(BaseException):
    """The process is dead from here on."""


class Layer:
    """Counts calls; ``fault`` may raise in them, ``limit`` cuts reads and writes short, ``dies_at`` is the last."""

    def __init__(self, *, fault: Fault | None = None, limit: Callable[[int], int] | None = None, dies_at: int = -1):
        self.writes = self.reads = 0
        self.dead = False
        self._fault, self._limit, self._dies_at = fault, limit, dies_at
        self._lock = threading.Lock()

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if name == "write" and args[0] <= 2:
                return real(*args, **more)
            if name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT):
                return real(*args, **more)
            with self._lock:
                if self.dead:
                    raise Killed
                reading = name in READING
                number = self.reads if reading else self.writes
                if reading:
                    self.reads += 1
                else:
                    self.writes += 1
                    self.dead = number == self._dies_at
                if self.dead:
                    if name in ("pwrite", "write"):
                        real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                    raise Killed
            if self._fault is not None:
                self._fault(name, number, args)
            if self._limit is not None:
                if name in ("pwrite", "write"):
                    args = (args[0], args[1][: self._limit(len(args[1]))], *args[2:])
                elif name == "preadv":
                    args = (args[0], [args[1][0][: self._limit(len(args[1][0]))]], *args[2:])
                elif name in ("pread", "read"):
                    args = (args[0], self._limit(args[1]), *args[2:])
            return real(*args, **more)

        return call


@contextmanager
def layered(layer: Layer) -> Iterator[Layer]:
    """Have every call pass through the layer."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*WRITING, *READING, "open"):
            patch.setattr(os, name, layer.wrapped(name, getattr(os, name)))
        patch.setattr(publish, "exchange", layer.wrapped("exchange", publish.exchange))
        patch.setattr(openfiles, "_reserve", layer.wrapped("reserve", openfiles._reserve))
        yield layer


def raising(code: int, *, on: str, at: int) -> Fault:
    """The ``at``-th call of ``os.<on>`` and all after it fail."""
    seen = 0

    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if name == on:
            seen += 1
            if seen > at:
                raise OSError(code, os.strerror(code))

    return fault


def folding_case(name: str, number: int, args: tuple[Any, ...]) -> None:
    """A file system on which README and readme are one name: making the second fails, as it is there already."""
    if name == "open" and args[1] & os.O_EXCL:
        path = Path(os.fsdecode(args[0]))
        if any(other.lower() == path.name.lower() for other in os.listdir(path.parent)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
