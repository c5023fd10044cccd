"""Writes small text files, and makes any name fit to stand in one."""

from __future__ import annotations

import os
import re

from ..errors import StorageError
from ..listing import shown

# Neither XML nor HTML may hold these, and names come from files that anyone may have made.
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def legal(text: str) -> str:
    """The text with every character that XML forbids replaced by U+FFFD."""
    return _ILLEGAL.sub("\ufffd", text)


def write_text(path: str | os.PathLike[str], text: str, *, append: bool = False) -> None:
    """Write UTF-8 text to a file, whole or at its end.

    Raises:
        StorageError: the operating system refuses; the message names the path.
    """
    try:
        with open(path, "ab" if append else "wb") as file:  # noqa: PTH123
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise StorageError(
            f"{shown(path)}: writing it failed: {error.strerror or error}; name a file in a directory that exists"
        ) from None
