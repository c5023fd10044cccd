"""Keeps Python's cyclic garbage collector out of the way while very many small records are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend the cyclic collector; also a decorator. Reference counting frees what is dropped as ever.

    A plan is some hundred thousand tuples without a cycle among them. The collector counts allocations
    and would go through all of them again and again in vain, for a sixth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
