"""What the commands share: options, how sizes are written, and how a report is printed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .errors import StorageError

if TYPE_CHECKING:
    from .options import Options
    from .reports import Report

F = TypeVar("F", bound=Callable[..., Any])
_SIZES = {"": 1} | {
    unit + suffix: base**power
    for power, unit in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("I", 1024))
}  # fmt: skip


def size(value: object) -> int:
    """Bytes, as 500MB (10**6) or 64MiB (2**20)."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]I?)?B?\s*", str(value).upper(), re.ASCII)
    if found is None:
        raise click.BadParameter(f"{value!r} is no size; write it as 500MB or 64MiB")
    return int(float(found[1]) * _SIZES[found[2] or ""])


def json_option(function: F) -> F:
    """The option ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout.")(function)


def moving_options(function: F) -> F:
    """Options of everything that moves bytes."""
    for option in reversed(
        (
            click.option("--threads", type=int, metavar="N", help="Threads that move bytes [default: 2 to 4]."),
            click.option("--max-memory", type=size, help="Bound for the buffers of all threads together."),
        )
    ):
        function = option(function)
    return function


def options_of(moving: dict[str, Any], **more: Any) -> Options:
    """The options of the command line as the library takes them: notes and progress go to stderr."""
    from .options import Options

    return Options(note=_note, progress=_progress if sys.stderr.isatty() else None, **moving, **more)


def _note(message: str) -> None:
    click.echo(f"note: {message}", err=True)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr) as bar:

        def advance(done: int) -> None:
            bar.update(done)

        yield advance


def show(report: Report, as_json: bool) -> None:
    """Print a report on stdout, as text or as JSON.

    Raises:
        StorageError: stdout cannot be written.
    """
    if as_json:
        import json

        text = json.dumps(report.as_json(), indent=1)
    else:
        from .report import render

        text = render(report)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:  # the reader of stdout has gone, which changes nothing about what was done
        drop_stdout()
    except OSError as error:
        drop_stdout()
        raise StorageError(f"stdout: writing the report failed: {error.strerror or error}") from None


def drop_stdout() -> None:
    """Have what is still buffered for stdout go nowhere, or the interpreter would complain at its end."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        return
