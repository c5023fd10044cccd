"""The two ways to run a rank, and which one a level takes.

*zero-pad*: every tensor at full size with zeros where the rank has nothing; runs wherever the model runs.
*local*: on the shapes that the rank stores, as engines do; the stronger one, since it also sees an order
of heads that no rank could use. It counts only where the tiny twin of the class passes that way.
"""

from __future__ import annotations

from typing import NamedTuple

from tpshard.errors import UnsupportedError, UsageError
from tpshard.shards import Shards

AUTO, LOCAL, ZERO_PAD = "auto", "local", "zero-pad"
MODES = (AUTO, LOCAL, ZERO_PAD)


class Way(NamedTuple):
    """The way taken, and notes that say why where it is not the one that a reader would expect."""

    mode: str
    notes: list[str]


def chosen(shards: Shards, mode: str, *, trust_remote_code: bool = False) -> Way:
    """The way to run the ranks of ``shards``.

    Raises:
        UsageError: there is no such mode.
        UnsupportedError: ``local`` was asked for, and the twin of this class does not pass so.
    """
    if mode not in MODES:
        raise UsageError(f"'{mode}' is no way to run a rank; choose among {', '.join(MODES)}")
    if mode == ZERO_PAD or shards.manifest.tp_size == 1:
        return Way(ZERO_PAD, [])
    from .twin import tried

    trial = tried(shards, trust_remote_code=trust_remote_code)
    problem = trial.problems[LOCAL]
    if not problem:
        return Way(LOCAL, [])
    if mode == LOCAL:
        raise UnsupportedError(f"the ranks cannot be run on local shapes: {problem}; use --mode zero-pad")
    if trial.ran and trial.problems[ZERO_PAD]:
        raise UnsupportedError(
            f"the verifier cannot run this model: a tiny random one of its class, cut by the same table, fails "
            f"({trial.problems[ZERO_PAD]}); use the levels structure, digest, bytes and plan"
        )
    return Way(ZERO_PAD, [f"ranks were run zero-padded, not on local shapes: {problem}"])
