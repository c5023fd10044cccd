"""The errors that tpshard raises, each with the exit status that the command line gives it.

A message names the tensor or file, the numbers, and the remedy. Nothing else leaves the library:
an ``OSError`` or ``ValueError`` that reaches a caller is a bug in tpshard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reports import Verification

_LONGEST_NAME = 200


def short(name: str) -> str:
    """A name out of a file for a message: of more than 200 characters, beginning and end and how many there are."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:120]}...{name[-60:]} ({len(name):,} characters)"


class TpshardError(Exception):
    """Base of every error that tpshard raises on purpose."""

    exit_status = 1


class UsageError(TpshardError):
    """The call itself makes no sense: a degree of 0, an output inside the input."""

    exit_status = 2


class UnsupportedError(TpshardError):
    """The model or the degree cannot be served: unknown tensors, more ranks than heads."""

    exit_status = 3


class DamagedError(TpshardError):
    """The input is damaged, incomplete, or contradicts itself."""

    exit_status = 4


class StorageError(TpshardError):
    """Reading or writing failed: no space, no permission, a device error."""

    exit_status = 5


class NotProvenError(TpshardError):
    """What was made did not pass the verification that was asked for, and was not published.

    ``report`` is the :class:`tpshard.reports.Verification`; the exit status is the one that is due for it.
    """

    def __init__(self, message: str, report: Verification) -> None:
        super().__init__(message)
        self.report = report
        self.exit_status = report.status or 1


class LayoutError(TpshardError):
    """Two layouts cannot be joined, or an interval list is not what it claims to be."""

    exit_status = 3
