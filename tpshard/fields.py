"""Typed access to parsed JSON from outside, with errors that name the file and the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from .errors import DamagedError

_LONGEST = 500  # characters of what a message says; names in a file may be of any length


class Fields:
    """A JSON value and where it stands: ``tpshard.json: files[3].size``."""

    def __init__(self, value: Any, where: str, remedy: str) -> None:
        self.value = value
        self.where = where
        self.remedy = remedy

    def wrong(self, why: str) -> NoReturn:
        """Raise DamagedError about this value."""
        why = why if len(why) <= _LONGEST else why[:_LONGEST] + "..."
        raise DamagedError(f"{self.where:.500} {why}; {self.remedy}")

    def __getitem__(self, key: str | int) -> Fields:
        if isinstance(key, int):
            return Fields(self.value[key], f"{self.where}[{key}]", self.remedy)
        if not isinstance(self.value, dict) or key not in self.value:
            self.wrong(f"has no '{key}'")
        return Fields(self.value[key], f"{self.where}{'.' if '.json: ' in self.where else ': '}{key:.80}", self.remedy)

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            self.wrong(f"is {shown_value(self.value)}, not text")
        return str(self.value)

    def whole(self, at_least: int = 0, at_most: int = 1 << 62) -> int:
        """A whole number in ``[at_least, at_most]``."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not at_least <= self.value <= at_most:
            self.wrong(f"is {shown_value(self.value)}, not a whole number from {at_least} to {at_most}")
        return int(self.value)

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.wrong(f"is {shown_value(self.value)}, not true or false")
        return bool(self.value)

    def items(self) -> Iterator[Fields]:
        """The members of a list."""
        if not isinstance(self.value, list):
            self.wrong(f"is {shown_value(self.value)}, not a list")
        return (Fields(value, f"{self.where}[{at}]", self.remedy) for at, value in enumerate(self.value))

    def pairs(self) -> Iterator[tuple[str, Fields]]:
        """The members of an object."""
        if not isinstance(self.value, dict):
            self.wrong(f"is {shown_value(self.value)}, not an object")
        return ((key, self[key]) for key in self.value)

    def mapping(self) -> dict[str, Any]:
        """An object, as it is."""
        if not isinstance(self.value, dict):
            self.wrong(f"is {shown_value(self.value)}, not an object")
        return dict(self.value)

    def texts(self) -> list[str]:
        """A list of strings."""
        if not isinstance(self.value, list) or not all(isinstance(text, str) for text in self.value):
            self.wrong("is not a list of texts")
        return list(self.value)


def shown_value(value: Any) -> str:
    """A JSON value for a message: short, whatever its size and however deeply it is nested."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
