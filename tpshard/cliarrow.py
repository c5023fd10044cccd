"""``8->4``, the way people write a change of degree, and what a shell makes of it without quotes."""

from __future__ import annotations

import os
import re
import sys

from .cliparts import on_terminal
from .errors import UsageError

_ARROW = re.compile(r"(\d{1,18})\s*(?:->|→)\s*(\d{1,18})", re.ASCII)
_HALF_ARROW = re.compile(r"\d{1,18}-", re.ASCII)


def taken_apart(words: tuple[str, ...], tp_size: int | None) -> tuple[int | None, int | None, tuple[str, ...]]:
    """The degree before the arrow, the new degree, and the other words; without an arrow ``tp_size`` is the new one.

    Raises:
        UsageError: half an arrow, or the new degree given twice.
    """
    _explain_redirection(words)
    found = [match for match in map(_ARROW.fullmatch, words) if match is not None]
    if not found:
        return None, tp_size, words
    if tp_size is not None or len(found) > 1:
        raise UsageError(f"the new degree is given twice: by {found[-1][0]!r} and by --tp; give it once")
    return int(found[0][1]), int(found[0][2]), tuple(word for word in words if not _ARROW.fullmatch(word))


def _explain_redirection(words: tuple[str, ...]) -> None:
    """``reshard 8->4`` without quotes reaches us as ``8-`` with stdout sent to a file named 4."""
    for word in words:
        if _HALF_ARROW.fullmatch(word):
            where = ""
            if not on_terminal(sys.stdout):
                try:
                    where = os.path.basename(os.readlink("/proc/self/fd/1"))
                except OSError:
                    where = ""
            target = where if where.isdigit() else "N"
            made = f"; the shell has just made (or emptied) a file named {where}, remove it" if where.isdigit() else ""
            raise UsageError(
                f"'{word}' is half of an arrow: the shell took the > for a redirection of the output{made}. "
                f"Quote it: tpshard reshard '{word}>{target}' SRC OUT"
            )
