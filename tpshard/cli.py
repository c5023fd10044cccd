"""The command line: parses words, calls the library, prints its report, and sets the exit status.

Exit status: 0 done, 1 verification found a difference, 2 usage, 3 unsupported model or degree,
4 damaged or incomplete input, 5 I/O failure or no space, 130 interrupted (143 by SIGTERM, 129 by
SIGHUP). Reports go to stdout, notes, progress and errors to stderr. The library is imported by the
command that needs it, so that ``--help`` is quick.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from .cliarrow import taken_apart
from .cliderive import derive
from .cliexport import export, source_engine_option
from .cliparts import (
    F,
    drop_stdout,
    file_size,
    json_option,
    on_terminal,
    open_missing_streams,
    options_of,
    say,
    show,
    table_option,
)
from .clirollback import rollback
from .cliverify import judging, run_of, settings_of, verify
from .cliwriting import writing
from .errors import NotProvenError, StorageError, TpshardError, UnsupportedError, UsageError
from .listing import GONE, current_directory_is_gone
from .signals import Ended, end_at_once, raise_in_main_thread

_MOST_DEGREES = 4096
_WRITING = ("split", "reshard", "merge", "export")


def degrees(value: object) -> list[int]:
    """Degrees, as 2,4,8 or 1-9."""
    out: list[int] = []
    for part in str(value).split(","):
        found = re.fullmatch(r"\s*(\d{1,18})(?:\s*-\s*(\d{1,18}))?\s*", part, re.ASCII)
        if found is None:
            raise click.BadParameter(f"{part!r:.80} is no degree; write them as 2,4,8 or 1-9")
        low, high = int(found[1]), int(found[2] or found[1])
        if high < low:
            raise click.BadParameter(f"{part!r} runs downwards; write it as {high}-{low}")
        if len(out) + high - low + 1 > _MOST_DEGREES:
            asked = f"{part!r} alone asks for {high - low + 1:,}" if not out else f"there are more with {part!r}"
            raise click.BadParameter(f"at most {_MOST_DEGREES:,} degrees are looked at at once, and {asked}")
        out += range(low, high + 1)
    return out


def _unknown(function: F) -> F:
    return click.option(
        "--copy-unknown", is_flag=True,
        help="Keep tensors that no rule knows whole on every rank; the report lists them.",
    )(function)  # fmt: skip


def _base(function: F) -> F:
    return click.option(
        "--base", metavar="BASE",
        help="SRC is a PEFT LoRA adapter of this model (its directory, its shards, or its config.json in a directory).",
    )(function)  # fmt: skip


def _dequantize(function: F) -> F:
    return click.option(
        "--dequantize", type=click.Choice(["bf16", "fp16", "fp32"]),
        help="Take the values of quantised matrices, in this dtype: any degree, and merge gives those.",
    )(function)  # fmt: skip


def _changed(function: F) -> F:
    return click.option(
        "--allow-changed", is_flag=True,
        help="Carry config.json and other side files that were changed since the split, as they are now.",
    )(function)  # fmt: skip


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="tpshard", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Cut checkpoints for tensor parallelism, re-cut them, join them, and prove it."""
    if context.invoked_subcommand is None:
        say(context.get_help())
        context.exit(2)


@cli.command()
@click.argument("path")
@table_option
@_base
@_unknown
@json_option
def inspect(path: str, base: str | None, copy_unknown: bool, as_json: bool) -> None:
    """Say what PATH is (a checkpoint, a hub id, an adapter, or shards) and which degrees it takes."""
    from .survey import inspect as survey

    show(survey(path, base=base, copy_unknown=copy_unknown), as_json)


@cli.command()
@click.argument("path", metavar="SRC")
@click.option("--tp", "tp_sizes", type=degrees, required=True, help="Degrees: 2,4,8 or 1-9.")
@click.option("--even", is_flag=True, help="Count only equal ranks as possible.")
@table_option
@_base
@_unknown
@json_option
def plan(path: str, tp_sizes: list[int], even: bool, base: str | None, copy_unknown: bool, as_json: bool) -> None:
    """Say what each degree would cost and give, before anything is written."""
    from .survey import plan as survey

    report = survey(path, tp_sizes, even=even, base=base, copy_unknown=copy_unknown)
    show(report, as_json)
    if not any(degree.possible for degree in report.degrees):
        raise UnsupportedError(report.degrees[0].reason)


@cli.command()
@click.argument("source", metavar="SRC")
@click.argument("output", metavar="OUT")
@click.option("--tp", "tp_size", type=int, required=True, help="Tensor-parallel degree.")
@click.option("--even", is_flag=True, help="Refuse a degree that gives unequal ranks.")
@click.option("--max-file-size", type=file_size, help="Number a rank's file into parts of at most this size.")
@click.option(
    "--digest", type=click.Choice(["xxh3_128", "sha256", "none"]), default="xxh3_128", show_default=True,
    help="Digest of every tensor, kept in the manifest.",
)  # fmt: skip
@_dequantize
@table_option
@_base
@_unknown
@click.option(
    "--verify", "levels", multiple=True, metavar="LEVEL",
    help="Publish OUT only if it passes this level of verify, or group of levels; may be repeated.",
)  # fmt: skip
@judging
@click.option(
    "--keep-failed/--no-keep-failed", default=True,
    help="Keep what --verify refused, as OUT.tpshard-failed. [default: keep]",
)
@click.option("--card/--no-card", default=True, help="With --verify: write tpshard-verification.json into OUT.")
@writing
@json_option
def split(
    source: str, output: str, tp_size: int, even: bool, max_file_size: int | None, digest: str,
    dequantize: str | None, base: str | None, copy_unknown: bool, levels: tuple[str, ...], compute: str | None,
    mode: str | None, tokens: int | None, min_coverage: float | None, device: str, trust_remote_code: bool,
    gates_file: str | None, keep_failed: bool, card: bool, as_json: bool, **moving: Any,
) -> None:  # fmt: skip
    """Cut the checkpoint SRC (a directory or hub id[@revision]) into one file a rank."""
    from .exporting.sources import is_engines

    if base is None and is_engines(source):
        raise UsageError(f"{source} holds an engine's files; cut them anew with: tpshard reshard {source} OUT --tp N")
    options = options_of(moving, algorithm="" if digest == "none" else digest)
    how: dict[str, Any] = {
        "even": even, "copy_unknown": copy_unknown, "max_file_bytes": max_file_size or 0, "base": base,
        "dequantize": dequantize,
    }  # fmt: skip
    if not levels:
        from .convert import split as convert

        show(convert(source, output, tp_size, options=options, **how), as_json)
        return
    from .gated import gated_split

    settings = settings_of(gates_file, compute=compute, mode=mode, tokens=tokens, min_coverage=min_coverage)
    try:
        report = gated_split(
            source, output, tp_size, levels, options=options, settings=settings,
            run=run_of(device, trust_remote_code), keep_failed=keep_failed, card=card, **how,
        )  # fmt: skip
    except NotProvenError as error:
        show(error.report, as_json)
        raise
    show(report, as_json)


@cli.command()
@click.argument("words", nargs=-1, metavar="SRC OUT")
@click.option("--tp", "tp_size", type=int, help="The new tensor-parallel degree.")
@click.option("--even", is_flag=True, help="Refuse a degree that gives unequal ranks.")
@click.option("--max-file-size", type=file_size, help="Number a rank's file into parts of at most this size.")
@_dequantize
@source_engine_option
@table_option
@_changed
@writing
@json_option
def reshard(
    words: tuple[str, ...], tp_size: int | None, even: bool, max_file_size: int | None, dequantize: str | None,
    source_engine: str | None, source_config: str | None, as_json: bool, **moving: Any,
) -> None:  # fmt: skip
    """Cut the shards SRC anew for another degree: reshard SRC OUT --tp 4, or reshard '8->4' SRC OUT.

    SRC may be an engine's directory; 'tpshard export' goes from engine to engine.
    """
    from_tp_size, tp_size, words = taken_apart(words, tp_size)
    if len(words) != 2 or tp_size is None:
        raise UsageError("reshard takes a source, an output and a degree: tpshard reshard SRC OUT --tp 4")
    from .exporting.sources import is_engines

    if is_engines(words[0], source_engine):
        from .exporting.native import reshard_engine

        report = reshard_engine(
            words[0], words[1], tp_size, engine=source_engine, config=source_config, even=even,
            max_file_bytes=max_file_size or 0, options=options_of(moving),
        )  # fmt: skip
        show(report, as_json)
        return
    from .convert import reshard as convert

    report = convert(
        words[0], words[1], tp_size, even=even, max_file_bytes=max_file_size, from_tp_size=from_tp_size,
        dequantize=dequantize, options=options_of(moving),
    )  # fmt: skip
    show(report, as_json)


@cli.command()
@click.argument("shards", metavar="SRC")
@click.argument("output", metavar="OUT")
@click.option(
    "--max-file-size", type=file_size, help="Pack the tensors anew into files of at most this size, with a new index."
)
@_dequantize
@source_engine_option
@table_option
@_changed
@writing
@json_option
def merge(
    shards: str, output: str, max_file_size: int | None, dequantize: str | None, source_engine: str | None,
    source_config: str | None, as_json: bool, **moving: Any,
) -> None:  # fmt: skip
    """Join the shards SRC to the checkpoint they were cut from: the original files, byte for byte.

    SRC may be an engine's directory: its tensors are then packed into new files.
    """
    from .exporting.sources import is_engines

    if is_engines(shards, source_engine):
        from .exporting.merging import merge_engine

        report = merge_engine(
            shards, output, engine=source_engine, config=source_config, repack_bytes=max_file_size,
            options=options_of(moving),
        )  # fmt: skip
        show(report, as_json)
        return
    from .convert import merge as convert

    report = convert(shards, output, repack_bytes=max_file_size, dequantize=dequantize, options=options_of(moving))
    show(report, as_json)


cli.add_command(export)
cli.add_command(rollback)
cli.add_command(verify)
cli.add_command(derive)


@cli.command("list")
@click.argument("what", type=click.Choice(["families", "engines"]))
@json_option
def list_(what: str, as_json: bool) -> None:
    """List the families that have a table, or the engines that have a layout."""
    from .survey import listing

    show(listing(what), as_json)


@cli.command()
@click.option("--keep", metavar="DIR", help="Make the files in DIR and keep them [default: a temporary directory].")
@json_option
def demo(keep: str | None, as_json: bool) -> None:
    """Make a tiny model on the spot, split it, reshard it, merge it, and prove the merge equal."""
    from .demonstration import demo as run

    report = run(keep)
    show(report, as_json)
    if not report.passed:
        sys.exit(1)


@cli.command()
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this family; may be repeated.")
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="Only this fault; may be repeated.")
@click.option("--quick", is_flag=True, help="Plant every fault once, and run a dozen good shards.")
@json_option
def selftest(families: tuple[str, ...], faults: tuple[str, ...], quick: bool, as_json: bool) -> None:
    """Corrupt tiny shards in many ways and require that verification sees every fault, and nothing else."""
    from .numerics import require

    require()
    from .selftest.runner import selftest as run

    progress = say if on_terminal(sys.stderr) else None
    report = run(families or None, faults=faults or None, quick=quick, progress=progress)
    show(report, as_json)
    if not report.passed:
        sys.exit(1)


def main(args: list[str] | None = None) -> None:
    """Run the command line as this process, whose signals it takes over, and exit with the documented status."""
    open_missing_streams()
    raise_in_main_thread()
    status = run(args)
    end_at_once("")  # there is nothing more to clean up
    sys.exit(status)


def run(args: list[str] | None = None) -> int:
    """Run the command line and return the exit status; nothing escapes but a bug under TPSHARD_TRACEBACK."""
    words = sys.argv[1:] if args is None else args
    try:
        status = cli.main(words, prog_name="tpshard", standalone_mode=False, obj=tuple(words))
        return status if isinstance(status, int) else 0  # click catches its own exits, and returns their status
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        return _ended(error, words)
    except click.ClickException as error:
        return _say(_usage(error), 2)
    except TpshardError as error:
        return _say(f"error: {error}", error.exit_status)
    except BrokenPipeError:
        drop_stdout()
        return 0
    except OSError as error:
        if current_directory_is_gone():
            return _say(f"error: {GONE}", StorageError.exit_status)
        return _say(f"error: {error.filename or 'I/O'}: {error.strerror or error}", StorageError.exit_status)
    except MemoryError:
        return _say("error: out of memory; lower --max-memory or --threads", StorageError.exit_status)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps what is raised inside a __set_name__
            return _ended(error, words)
        if os.environ.get("TPSHARD_TRACEBACK"):
            raise
        return _say(
            f"error: this is a bug in tpshard ({type(error).__name__}: {error}); "
            "please report it with the output under TPSHARD_TRACEBACK=1",
            70,
        )


def _ended(error: BaseException, words: Sequence[str]) -> int:
    """Say that a signal ended the run, and with which status; the signal may be the error's cause."""
    ended = error if isinstance(error, Ended) else error.__cause__
    cause, status = (ended.cause, ended.exit_status) if isinstance(ended, Ended) else ("interrupted", 130)
    if not any(word in _WRITING for word in words[:1]):
        return _say(cause, status)
    left = "go on with --resume" if "--resume" in words else "nothing was left at the output"
    return _say(f"{cause}; {left}", status)


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    usage = f"{context.get_usage()}\n" if context is not None else ""
    return f"{usage}error: {error.format_message()}"


def _say(message: str, status: int) -> int:
    say(message)
    return status
