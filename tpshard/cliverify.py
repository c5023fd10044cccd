"""The command ``verify``, and the options about verification that ``split`` shares with it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from .cliexport import source_engine_option
from .cliparts import F, json_option, options_of, say, show, size
from .errors import UsageError
from .launch import reports

if TYPE_CHECKING:
    from .gates import Settings
    from .reports import Verification
    from .verification import Run

LEVELS_HELP = (
    "structure, digest, bytes, plan, twin, forward, backward or runtime; or quick (structure, plan), standard "
    "(structure, digest, bytes, plan, forward), full (all). May be repeated."
)


GATES = "tpshard.toml"
_NO_GATES = "tpshard.no_gates"


def _without_gates(context: click.Context, option: click.Parameter, given: bool) -> None:
    context.meta[_NO_GATES] = given


def judging(function: F) -> F:
    """Options of how the ranks are run and judged."""
    for option in reversed(
        (
            click.option(
                "--compute", type=click.Choice(["fp64", "fp32", "native"]),
                help="Dtype in which the ranks are run. [default: fp64]",
            ),
            click.option(
                "--mode", type=click.Choice(["auto", "zero-pad", "local"]),
                help="How a rank is run: in full shapes with zeros, or in its own. [default: auto]",
            ),
            click.option("--tokens", type=click.IntRange(1, 1 << 20), metavar="N", help="Tokens to run. [default: 8]"),
            click.option(
                "--min-coverage", type=click.FloatRange(0, 100), metavar="P",
                help="Percent of the parameters that must be exercised. [default: what the original's own run does]",
            ),
            click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
            click.option("--trust-remote-code", is_flag=True, help="Run model code that lies in the checkpoint."),
            click.option(
                "--gates", "gates_file", metavar="FILE",
                help="A file of levels, gates, and the above. [default: ./tpshard.toml, where there is one]",
            ),
            click.option(
                "--no-gates", is_flag=True, expose_value=False, callback=_without_gates,
                help="Leave ./tpshard.toml unread.",
            ),
        )
    ):  # fmt: skip
        function = option(function)
    return function


def settings_of(
    gates_file: str | None, *, compute: str | None, mode: str | None, tokens: int | None, min_coverage: float | None
) -> Settings:
    """The settings of a ``tpshard.toml``, where there is one, under those of the command line.

    Without a name it is that of the working directory, of which it is said that it is read.

    Raises:
        UsageError: the file is not one, or has a key that nothing reads; it is both named and refused.
    """
    from .gates import Settings, read_settings

    refused = click.get_current_context().meta.get(_NO_GATES, False)
    if refused and gates_file is not None:
        raise UsageError(f"--gates {gates_file} and --no-gates contradict each other: leave one of them away")
    if not refused and gates_file is None and os.path.isfile(GATES):
        gates_file = GATES
        if reports():
            say(f"note: levels and gates are those of ./{GATES} (--gates FILE names another, --no-gates none)")
    settings = read_settings(gates_file) if gates_file is not None else Settings()
    part = None if min_coverage is None else min_coverage / 100
    given = {"compute": compute, "mode": mode, "tokens": tokens, "min_coverage": part}
    return replace(settings, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]


def run_of(device: str, trust_remote_code: bool, text: str | None = None) -> Run:
    """How the numeric levels run; the command is the one that is being carried out."""
    from .verification import Run

    words: tuple[str, ...] = click.get_current_context().find_root().obj or ()
    return Run(device, text, trust_remote_code, command=("tpshard", *words))


@click.command()
@click.argument("words", nargs=-1, metavar="SHARDS")
@click.option("--against", metavar="SRC", help="The source, or other shards of the same model, to compare with.")
@click.option(
    "--level", "levels", multiple=True, metavar="LEVEL",
    help=LEVELS_HELP + " [default: structure, digest, plan, and bytes with --against]",
)  # fmt: skip
@judging
@source_engine_option
@click.option("--text", metavar="FILE", help="A text whose perplexity is told for the original and the ranks.")
@click.option("--baseline", metavar="FILE", help="Fail on drift from an earlier run, of the same hardware and torch.")
@click.option("--write-baseline", metavar="FILE", help="Write this run's figures for later ones to be held against.")
@click.option("--junit", metavar="FILE", help="Write the verdict as JUnit XML.")
@click.option(
    "--summary", metavar="FILE", help="Write it as Markdown. [default: appended to $GITHUB_STEP_SUMMARY, where set]"
)
@click.option("--html", metavar="FILE", help="Write it as one self-contained HTML page.")
@click.option("--card/--no-card", default=False, help="Write tpshard-verification.json into SHARDS.")
@click.option("--threads", type=int, metavar="N", help="Threads that read bytes [default: 2 to 4].")
@click.option(
    "--max-memory", type=size,
    help="Bound for buffers, and for the weights held at a time; Python's own and the imports, about 280 MB where "
    "ranks are run, are outside.",
)
@json_option
def verify(
    words: tuple[str, ...], against: str | None, levels: tuple[str, ...], compute: str | None, mode: str | None,
    tokens: int | None, min_coverage: float | None, device: str, trust_remote_code: bool, gates_file: str | None,
    text: str | None, baseline: str | None, write_baseline: str | None, card: bool, as_json: bool,
    threads: int | None, max_memory: int | None, source_engine: str | None, source_config: str | None,
    **files: str | None,
) -> None:  # fmt: skip
    """Check SHARDS: headers, digests, the plan; against SRC every byte; and run the ranks as a model.

    Exit status: 0 every level passed, 1 something is wrong with the shards (missing, damaged, stray or
    different), 2 usage, 3 a level cannot be run for this model or here, 4 the manifest or the source cannot
    be read for what it is, or the source holds NaN (told by forward, backward and runtime), 5 I/O failure.
    """
    if len(words) == 2 and against is None:
        against, shards = words  # verify SRC SHARDS
    elif len(words) == 1:
        shards = words[0]
    else:
        raise UsageError("verify takes one directory of shards: tpshard verify SHARDS --against SRC")
    from . import baseline as baselines
    from .verification import verify as check

    settings = settings_of(gates_file, compute=compute, mode=mode, tokens=tokens, min_coverage=min_coverage)
    stored = None if baseline is None else baselines.read_baseline(baseline)
    options = options_of({"threads": threads, "max_memory": max_memory})
    from .exporting.sources import is_engines

    if is_engines(shards, source_engine):
        from .exporting.checking import verify_engine

        report = verify_engine(
            shards, against=against, levels=levels, engine=source_engine, config=source_config, options=options
        )
    else:
        report = check(
            shards, against=against, levels=levels or None, options=options, settings=settings,
            run=run_of(device, trust_remote_code, text),
        )  # fmt: skip
    if baseline is not None and stored is not None:
        baselines.compare(report, baseline, stored)
    if reports():  # under torchrun every process comes here, and one speaks for all
        write_outputs(report, shards, card=card, **files)
        show(report, as_json)
    if write_baseline is not None and reports():
        if report.passed:
            baselines.write_baseline(write_baseline, report)
        else:
            say(f"note: {write_baseline} is not written: the verification did not pass")
    if not report.passed:
        sys.exit(report.status or 1)


def write_outputs(
    report: Verification, shards: str, *, card: bool = False, junit: str | None = None, summary: str | None = None,
    html: str | None = None,
) -> None:  # fmt: skip
    """Write the files that were asked for; the summary also where GitHub's runner asks for it.

    Raises:
        StorageError: one cannot be written.
    """
    asked = os.environ.get("GITHUB_STEP_SUMMARY")
    if not (card or junit or summary or html or asked):
        return
    from pathlib import Path

    from .outputs.files import write_text

    if junit:
        from .outputs.junit import junit as as_junit

        write_text(junit, as_junit(report))
    if summary or asked:
        from .outputs.summary import summary as as_summary

        write_text(summary or asked or "", as_summary(report), append=not summary or summary == asked)
    if html:
        from .outputs.page import page

        write_text(html, page(report))
    if card:
        from .outputs.card import write_card
        from .shards import read_manifest

        write_card(Path(shards), report, read_manifest(Path(shards)))
