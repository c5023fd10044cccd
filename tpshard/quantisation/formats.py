"""The vocabulary of quantisation tables: what stands in a matrix's place, by dimension.

A :class:`Format` lists the tensors (:class:`Member`) that stand for one matrix; each dimension of a member is a
dimension of the matrix at a ratio (:class:`Of`), or a plain length that every rank holds whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple, TypeAlias

OUT, IN, BANK = 0, 1, 2  # dimensions of a matrix: outputs, inputs, and the experts of a bank
EVERY_FLOAT = frozenset({"F64", "F32", "F16", "BF16"})
FLOATS8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


class Of(NamedTuple):
    """``stored`` indices for each group of ``per`` of the matrix's dimension ``dim``; the last group may be short.

    A scale for groups of 128 inputs is ``Of(IN, 1, 128)``, 4-bit integers in 32-bit words are ``Of(IN, 1, 8)``. A
    group lies on one rank, with all its stored indices. With ``cut`` False every rank holds all of them, however
    the matrix is cut.
    """

    dim: int
    stored: int = 1
    per: int = 1
    cut: bool = True

    def length(self, whole: int) -> int:
        """Stored indices for ``whole`` of the matrix."""
        return -(-whole // self.per) * self.stored

    def whole(self, length: int) -> int:
        """Indices of the matrix that ``length`` stored ones stand for, with no group short."""
        return length // self.stored * self.per


class Flat(NamedTuple):
    """``stored`` indices for each run of ``per`` elements of the matrix ``[out, in]``, row after row."""

    stored: int
    per: int

    def length(self, elements: int) -> int:
        """Stored indices for so many elements."""
        return -(-elements // self.per) * self.stored


class Parts(NamedTuple):
    """One index for every part of a fused dimension (``[gate; up]`` has two), all of them on every rank."""

    dim: int


def packed(dim: int, bits: int, word: int = 32, *, cut: bool = True) -> Of:
    """Integers of ``bits`` that lie without gaps in words of ``word`` bits: whole words for whole groups of them."""
    shared = gcd(bits, word)
    return Of(dim, bits // shared, word // shared, cut)


Entry: TypeAlias = "Of | Flat | Parts | int | None"
Form: TypeAlias = "tuple[Entry, ...]"
"""Dimensions of a member: a ratio, a length that it must have, or None for any length."""

ONE: tuple[Form, ...] = ((), (1,), (1, 1))  # one value for all of the matrix


@dataclass(frozen=True)
class Member:
    """A tensor beside or in place of a matrix.

    Args:
        suffix: what its name has behind the matrix's module (``.qweight``) or behind the bank's name (``_blocks``).
        kind: what it is: ``values`` (in the matrix's own shape), ``packed``, ``scale``, ``zero``, ``order``, ``state``.
        forms: the shapes that it may have; the first that fits is taken.
        optional: whether it may be missing.
        note: how a rank is to use its part, where that is not as in the whole.
        noted: the dimensions of the matrix, one of which must be cut for the note to be said.
    """

    suffix: str
    kind: str
    forms: tuple[Form, ...]
    optional: bool = False
    note: str = ""
    noted: tuple[int, ...] = (IN,)


@dataclass(frozen=True)
class Format:
    """What stands for one matrix.

    Args:
        name: for messages: ``GPTQ with 4 bits in groups of 128``.
        members: the first is the one that is always there and holds the values.
        weight: what the matrix's own name has behind the stem: ``.weight``, or nothing for a bank.
        dtypes: safetensors dtypes of the first member; empty for any.
        plain: the first member looks like a matrix that is not quantised, and is one where the others are missing.
    """

    name: str
    members: tuple[Member, ...]
    weight: str = ".weight"
    dtypes: frozenset[str] = frozenset()
    plain: bool = False

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the matrix, in the order in which most tables have them."""
        has_bank = any(isinstance(entry, Of) and entry.dim == BANK for form in self.members[0].forms for entry in form)
        return (BANK, OUT, IN) if has_bank else (OUT, IN)

    def suffixes(self) -> Mapping[str, Member]:
        """The members by suffix."""
        return {member.suffix: member for member in self.members}


def inferred(form: Form, stored: tuple[int, ...]) -> dict[int, int] | None:
    """The lengths of the matrix by the shape of its first member; None where that cannot be such a form."""
    if len(form) != len(stored):
        return None
    found: dict[int, int] = {}
    for entry, length in zip(form, stored, strict=True):
        if isinstance(entry, Of):
            found[entry.dim] = entry.whole(length)
        elif isinstance(entry, Flat) or (isinstance(entry, int) and entry != length):
            return None
    return found


def banked(fmt: Format, suffixes: Mapping[str, str]) -> Format:
    """The same format for stacked experts ``[experts, out, in]``, each member under another suffix.

    What is one value for a matrix is one for every expert, or one for all.
    """
    members = []
    for member in fmt.members:
        if member.suffix not in suffixes:
            continue
        forms: list[Form] = [(Of(BANK), *form) for form in member.forms]
        if () in member.forms:
            forms += [*ONE, (Of(BANK), 1, 1)]
        members.append(replace(member, suffix=suffixes[member.suffix], forms=tuple(forms)))
    return replace(fmt, members=tuple(members), weight="")
