"""How much memory this process may still take."""

from __future__ import annotations

import os
import resource
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be had: of the machine, of the control group (v2), and under the process' own limits.

    0 where the system tells nothing.
    """
    known = [found for found in (_machine(), _group(), *_limits()) if found is not None]
    return max(0, min(known, default=0))


def _machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError, AttributeError):
        return None


def _group() -> int | None:
    try:
        most = (CGROUP / "memory.max").read_text().strip()
        return None if most == "max" else int(most) - int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def _limits() -> list[int]:
    found = []
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            found.append(soft - _held(kind))
    return found


def _held(kind: int) -> int:
    name = "VmData:" if kind == resource.RLIMIT_DATA else "VmSize:"
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 0
