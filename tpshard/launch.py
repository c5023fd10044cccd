"""Whether ``torchrun`` has started this process as one of several that run the same command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from .errors import UsageError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Launch(NamedTuple):
    """This process' place among those that were started together; ``local`` ones are those of this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The place that torchrun gave this process, None where it was started plainly.

    Raises:
        UsageError: torchrun's variables are there but are no numbers.
    """
    if any(name not in environment for name in (*_NUMBERS, "MASTER_ADDR", "TORCHELASTIC_RUN_ID")):
        return None
    try:
        return Launch(*(int(environment[name]) for name in _NUMBERS))
    except ValueError:
        text = ", ".join(f"{name}={environment[name]}" for name in _NUMBERS)
        raise UsageError(
            f"torchrun's variables are set but are no numbers ({text}); unset them, or start with torchrun"
        ) from None


def reports() -> bool:
    """Whether this process is the one that reports: the only one, or the first of those that torchrun started."""
    found = launched()
    return found is None or found.rank == 0
