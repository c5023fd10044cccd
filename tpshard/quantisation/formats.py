"""The vocabulary of quantisation tables: what stands in a matrix's place, by dimension.

A :class:`Format` lists the tensors (:class:`Member`) that stand for one matrix; each dimension of a member is a
dimension of the matrix at a ratio (:class:`Of`), or a plain length that every rank holds whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

OUT, IN = 0, 1  # the dimensions of a linear layer's weight, [out, in]


class Of(NamedTuple):
    """``stored`` indices for every ``per`` of the matrix's dimension ``dim``, the last ones rounded up.

    A scale for groups of 128 inputs is ``Of(IN, 1, 128)``, 4-bit integers in 32-bit words are ``Of(IN, 4, 32)``.
    """

    dim: int
    stored: int = 1
    per: int = 1

    def length(self, whole: int) -> int:
        """Stored indices for ``whole`` of the matrix."""
        return -(-whole * self.stored // self.per)

    def whole(self, length: int) -> int:
        """Indices of the matrix that ``length`` stored ones stand for, where they divide."""
        return length * self.per // self.stored


Form: TypeAlias = "tuple[Of | int | None, ...]"
"""Dimensions of a member: a ratio, a length that it must have, or None for any length."""


@dataclass(frozen=True)
class Member:
    """A tensor beside or in place of a matrix.

    Args:
        suffix: what its name has behind the matrix's module (``.qweight``) or behind the bank's name (``_blocks``).
        kind: what it is: ``packed``, ``scale``, ``zero``, ``order``, ``state``.
        forms: the shapes that it may have; the first that fits is taken.
        optional: whether it may be missing.
        note: how a rank is to use its part, where that is not as in the whole.
    """

    suffix: str
    kind: str
    forms: tuple[Form, ...]
    optional: bool = False
    note: str = ""


@dataclass(frozen=True)
class Format:
    """What stands for one matrix.

    Args:
        name: for messages: ``GPTQ with 4 bits in groups of 128``.
        members: the first is the one that is always there and holds the values.
        weight: what the matrix's own name has behind the stem: ``.weight``, or nothing for a bank.
        rank: dimensions of the matrix.
        dtypes: safetensors dtypes of the first member, where its name alone does not say that it is quantised.
    """

    name: str
    members: tuple[Member, ...]
    weight: str = ".weight"
    rank: int = 2
    dtypes: frozenset[str] = frozenset()

    def shape(self, packed: tuple[int, ...]) -> tuple[int, ...] | None:
        """The matrix's shape by that of the first member; None where it is none that the format can have."""
        for form in self.members[0].forms:
            if len(form) != len(packed):
                continue
            found: dict[int, int] = {}
            for entry, length in zip(form, packed, strict=True):
                if isinstance(entry, Of):
                    found[entry.dim] = found.get(entry.dim, 1) * entry.whole(length)
                elif entry is not None and entry != length:
                    break
            else:
                if len(found) == self.rank:
                    return tuple(found[dim] for dim in range(self.rank))
        return None

    def suffixes(self) -> Mapping[str, Member]:
        """The members by suffix."""
        return {member.suffix: member for member in self.members}
