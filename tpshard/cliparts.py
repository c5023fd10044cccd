"""What the commands share: options, how sizes are written, and how a report is printed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

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
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def size(value: object) -> int:
    """Bytes, as 500MB (10**6) or 64MiB (2**20)."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]I?)?B?\s*", str(value).upper(), re.ASCII)
    if found is None:
        raise click.BadParameter(f"{value!r} is no size; write it as 500MB or 64MiB")
    return int(float(found[1]) * _SIZES[found[2] or ""])


def file_size(value: object) -> int:
    """Bytes that a file may have at most, written as for :func:`size`; 0 is none."""
    nbytes = size(value)
    if not nbytes:
        raise click.BadParameter("a file of 0 bytes holds no tensor; leave the option away where no bound is meant")
    return nbytes


def json_option(function: F) -> F:
    """The option ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout.")(function)


def _with_table(context: click.Context, option: click.Parameter, path: str | None) -> None:
    if path is not None:
        from .registry import given_table

        context.with_resource(given_table(path))


def table_option(function: F) -> F:
    """The option ``--table``: for the time of the command a table of the user's own serves its model types."""
    return click.option(
        "--table", metavar="FILE", expose_value=False, callback=_with_table,
        help="Cut by the table in this file (derive writes such), which is Python and is executed.",
    )(function)  # fmt: skip


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

    observer = moving.get("observer")

    def note(message: str) -> None:
        say(f"note: {message}")
        if observer is not None:
            observer.noting(message)

    return Options(note=note, progress=_progress if on_terminal(sys.stderr) else None, **moving, **more)


def on_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; one that was closed before the start is None."""
    return stream is not None and stream.isatty()


def printable(text: str) -> str:
    """Text as it may be sent to a terminal: control characters but line breaks, and those that turn the direction of
    writing, as escapes; also what no encoding takes.
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def say(message: str) -> None:
    """Print a line on stderr, if it can be."""
    with suppress(OSError):
        click.echo(printable(message), err=True)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr) as bar:

        def advance(done: int) -> None:
            bar.update(done)

        yield advance


_SILENT = "tpshard.silent"


def silence() -> None:
    """Have the command that runs print no report: stdout is its log."""
    click.get_current_context().meta[_SILENT] = True


def show(report: Report, as_json: bool) -> None:
    """Print a report on stdout, as text or as JSON, unless stdout is the log.

    Raises:
        StorageError: stdout cannot be written.
    """
    context = click.get_current_context(silent=True)
    if context is not None and context.meta.get(_SILENT):
        return
    if as_json:
        import json

        text = json.dumps(report.as_json(), indent=1)
    else:
        from .report import render

        text = render(report)
    if sys.stdout is None:
        raise StorageError("stdout: the report cannot be written: it was closed before the start; redirect it instead")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        click.echo(printable(text).encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:  # the reader of stdout has gone, which changes nothing about what was done
        drop_stdout()
    except OSError as error:
        drop_stdout()
        raise StorageError(f"stdout: writing the report failed: {error.strerror or error}") from None


def open_missing_streams() -> None:
    """Where descriptor 0, 1 or 2 was closed before the start, have it go nowhere.

    The next file to be opened would else get that number, and whatever a library prints would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def drop_stdout() -> None:
    """Have what is still buffered for stdout go nowhere, or the interpreter would complain at its end."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        return
