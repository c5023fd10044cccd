"""Numbers of things, as sentences have them."""

from __future__ import annotations

from collections.abc import Sized


def counted(things: int | Sized, noun: str) -> str:
    """``1 file``, ``2 files``, ``1,234 files``: a number, or how many a collection holds, with its noun."""
    number = things if isinstance(things, int) else len(things)
    return f"{number:,} {noun if number == 1 else noun + 's'}"
