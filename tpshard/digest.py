"""Digests of stored tensors, taken while the bytes pass.

The default is xxh3-128: it runs at memory speed, so it costs a few per cent of a copy, where
sha256 costs more than the copy itself. It finds every accident; it isn't meant to withstand
an attacker, for whom ``sha256`` can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, overload

from .errors import UsageError

WIDTHS = {"xxh3_128": 32, "sha256": 64}  # hexadecimal digits of a digest
ALGORITHMS = tuple(WIDTHS)


class Digests(Sequence[str]):
    """Digests of one width, hex, kept as one text: very many of them are a tenth of the size of as many strings."""

    __slots__ = ("text", "width")

    def __init__(self, text: str, width: int) -> None:
        self.text = text
        self.width = width

    @classmethod
    def of(cls, digests: Iterable[str], algorithm: str) -> Digests:
        """The digests that ``algorithm`` gave, one after the other."""
        return cls("".join(digests), WIDTHS[algorithm])

    def __len__(self) -> int:
        return len(self.text) // self.width

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        first = (at if at >= 0 else at + len(self)) * self.width
        found = self.text[first : first + self.width]
        if first < 0 or not found:
            raise IndexError(at)
        return found

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Digests):
            return self.text == other.text and self.width == other.width
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.text)


class Taken(Sequence["str | None"]):
    """Digests that come in any order, each in its place, None until it has come; kept as their bare bytes."""

    __slots__ = ("_bytes", "_there", "_width")

    def __init__(self, count: int, algorithm: str | None) -> None:
        self._width = WIDTHS[algorithm] // 2 if algorithm else 0
        self._bytes = bytearray(count * self._width)
        self._there = bytearray(count)

    def __len__(self) -> int:
        return len(self._there)

    def __setitem__(self, at: int, digest: str | None) -> None:
        self._there[at] = digest is not None
        if digest is not None:
            self._bytes[at * self._width : (at + 1) * self._width] = bytes.fromhex(digest)

    @overload
    def __getitem__(self, at: int) -> str | None: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str | None]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str | None] | None:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        if not self._there[at]:
            return None
        first = (at if at >= 0 else at + len(self._there)) * self._width
        return self._bytes[first : first + self._width].hex()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Hasher(Protocol):
    """What hashlib and xxhash objects share."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def new_hasher(algorithm: str) -> Callable[[], Hasher]:
    """Return the constructor of a streaming hash. ``algorithm`` is one of :data:`ALGORITHMS`.

    Raises :class:`UsageError` for any other name.
    """
    if algorithm == "xxh3_128":
        import xxhash

        return xxhash.xxh3_128
    if algorithm == "sha256":
        import hashlib

        return hashlib.sha256
    raise UsageError(f"unknown digest {algorithm!r}: use one of {', '.join(ALGORITHMS)}")


def digest_of(algorithm: str) -> Callable[[memoryview], str]:
    """Return the function from bytes to their hex digest, for data that lies in memory whole."""
    if algorithm == "xxh3_128":
        import xxhash

        whole: Callable[[memoryview], str] = xxhash.xxh3_128_hexdigest
        return whole
    new = new_hasher(algorithm)

    def whole_slowly(data: memoryview) -> str:
        hasher = new()
        hasher.update(data)
        return hasher.hexdigest()

    return whole_slowly


class Stream:
    """The digest of one extent of ``nbytes`` bytes, fed in pieces; usable while they come in ascending order."""

    __slots__ = ("_hasher", "at", "in_order", "nbytes")

    def __init__(self, hasher: Hasher, nbytes: int) -> None:
        self._hasher = hasher
        self.nbytes = nbytes
        self.at = 0
        self.in_order = True

    def feed(self, at: int, data: memoryview) -> None:
        """Take the bytes ``[at, at + len(data))`` of the extent."""
        if at == self.at and self.in_order:
            self._hasher.update(data)
            self.at += len(data)
        else:
            self.in_order = False

    def hexdigest(self) -> str | None:
        """Return the digest, or None where the bytes did not all pass in ascending order."""
        return self._hasher.hexdigest() if self.in_order and self.at == self.nbytes else None
