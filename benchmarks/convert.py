"""The benchmark: split, reshard and merge against `cp -r` of the same files and against the script everyone writes.

    python benchmarks/convert.py                              every checkpoint, warm and cold, 5 rounds (half an hour)
    python benchmarks/convert.py --checkpoint llama-1b --cache warm --rounds 3
    python benchmarks/convert.py --check                      one round and no figures: are the results right?

Prints a table and writes convert.json (every run) and convert.md (the tables) to docs/measurements/. What is in a row:
the job on one checkpoint from one state of the page cache, by `cp -r` of the job's input, by `tpshard` at its default
settings (digests of everything read and written included, from process start to process end), and by
benchmarks/common_script.py. Ratios are medians over paired rounds; the ratio of the two minima stands in brackets.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from make_checkpoint import make_checkpoint
from measure import (
    Comparison,
    Program,
    Run,
    clean_environment,
    compare,
    files_under,
    interpreter_anonymous,
    machine,
    tpshard_command,
)

PROGRAMS = ("cp -r", "tpshard", "common script")
CHECKPOINTS = ("llama-1b", "mixtral", "many-experts")
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """One row: ``source`` ("hf" or "tp8") names the input, the rest is what each program is told."""

    name: str
    source: str
    tpshard: tuple[str, ...]
    common: tuple[str, ...]


JOBS = (
    Job("split 8", "hf", ("split", "--tp", "8"), ("split", "8")),
    Job("reshard 8->4", "tp8", ("reshard", "--tp", "4"), ("reshard", "4")),
    Job("reshard 8->3", "tp8", ("reshard", "--tp", "3"), ("reshard", "3")),
    Job("merge 8->1", "tp8", ("merge",), ("merge",)),
)


def programs_for(job: Job, source: Path, common_rounds: int) -> list[Program]:
    """`cp`, `tpshard` and the common script, each doing ``job``."""
    verb, *options = job.tpshard
    common_verb, *degree = job.common
    return [
        Program("cp -r", lambda out: ["cp", "-r", str(source), str(out)]),
        Program("tpshard", lambda out: [tpshard_command(), verb, str(source), str(out), *options]),
        Program(
            "common script",
            lambda out: [sys.executable, str(HERE / "common_script.py"), common_verb, str(source), str(out), *degree],
            rounds=common_rounds,
        ),
    ]


def measure_checkpoint(
    checkpoint: str, scratch: Path, caches: Sequence[str], jobs: Sequence[Job], rounds: int, common_rounds: int
) -> Iterator[Comparison]:
    """Makes the checkpoint and its 8 ranks, proves the round trip once, then measures every row."""
    print(f"{checkpoint}: making it and its 8 ranks", file=sys.stderr)
    sources = {"hf": scratch / "hf", "tp8": scratch / "tp8"}
    make_checkpoint(checkpoint, sources["hf"])
    run_quietly([tpshard_command(), "split", str(sources["hf"]), str(sources["tp8"]), "--tp", "8"])
    check_round_trip(sources["hf"], sources["tp8"], scratch)
    for cache in caches:
        for job in jobs:
            source = sources[job.source]
            programs = programs_for(job, source, common_rounds)
            yield compare(job.name, source, programs, scratch, rounds=rounds, cold=cache == "cold")


def check_round_trip(original: Path, ranks: Path, scratch: Path) -> None:
    """8 -> 3 -> merged must give back every file of the original: a wrong result has no speed.

    Raises SystemExit naming the first file that differs.
    """
    three, merged = scratch / "three", scratch / "merged"
    run_quietly([tpshard_command(), "reshard", str(ranks), str(three), "--tp", "3"])
    run_quietly([tpshard_command(), "merge", str(three), str(merged)])
    for path in files_under(original):
        name = path.relative_to(original)
        if not (merged / name).is_file() or not filecmp.cmp(path, merged / name, shallow=False):
            sys.exit(f"{name}: merged from 3 ranks, resharded from 8, it is not the file that was split")
    shutil.rmtree(three)
    shutil.rmtree(merged)
    print("  8->3->merge gives back every file of the original", file=sys.stderr)


def run_quietly(command: list[str]) -> None:
    """Runs ``command``; SystemExit with its messages where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
    if done.returncode != 0:
        sys.exit(f"status {done.returncode}: {' '.join(command)}\n{done.stderr[-3000:]}")


def row_of(comparison: Comparison, program: str, floor: int) -> list[str]:
    """One program's line in the table. ``floor`` is the interpreter's own anonymous memory in bytes."""
    runs = comparison.of(program)

    def wall(run: Run) -> float:
        return run.wall

    def cpu(run: Run) -> float:
        return run.cpu

    def against(base: str, value: Callable[[Run], float]) -> str:
        if program in ("cp -r", base) or not comparison.of(base):
            return ""
        return f"{comparison.ratio(program, base, value):.2f} ({comparison.ratio_of_minima(program, base, value):.2f})"

    anonymous = max(run.peak_anonymous for run in runs)
    above = "" if program == "cp -r" else f" (+{(anonymous - floor) / 2**20:.0f})"
    return [
        comparison.job,
        comparison.cache,
        program,
        str(len(runs)),
        f"{statistics.median(map(wall, runs)):.2f}",
        f"{min(map(wall, runs)):.2f}",
        against("cp -r", wall),
        against("common script", wall),
        f"{statistics.median(map(cpu, runs)):.2f}",
        against("cp -r", cpu),
        f"{max(run.peak_rss for run in runs) / 2**20:.0f}",
        f"{anonymous / 2**20:.0f}{above}",
        f"{statistics.median(run.disk_read for run in runs) / 1e6:.0f}",
        f"{statistics.median(run.others for run in runs):.0%}",
    ]


HEADINGS = (
    "job",
    "cache",
    "program",
    "runs",
    "wall s, median",
    "min",
    "wall / cp (min/min)",
    "wall / common",
    "CPU s",
    "CPU / cp (min/min)",
    "peak RSS MiB",
    "peak anonymous MiB (above python)",
    "disk read MB",
    "others' CPU",
)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A pipe table under :data:`HEADINGS`."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def report(results: dict[str, list[Comparison]], floor: int, about: dict[str, str]) -> str:
    """The whole markdown page."""
    parts = [
        "# Converting: wall, CPU and memory against `cp` and the common script",
        "Written by `python benchmarks/convert.py`, which says how it measures; every single run is in `convert.json`.",
        "\n".join(f"- {key}: {value}" for key, value in about.items())
        + f"\n- anonymous memory of an idle interpreter: {floor / 2**20:.0f} MiB",
        "Wall and CPU are whole processes, from start to end. `wall / cp` is the median of the ratios within a round, "
        "in brackets the ratio of the two minima. Memory is the highest over all runs, sampled every 4 ms. Cold means "
        "that the input files were dropped from the page cache (`posix_fadvise`); `disk read` shows it. `others' CPU` "
        "is what other processes used of the machine meanwhile: where it is not near zero, trust the minima.",
    ]
    for checkpoint, comparisons in results.items():
        gigabytes = comparisons[0].input_bytes / 1e9
        rows = [
            row_of(comparison, program, floor)
            for comparison in comparisons
            for program in PROGRAMS
            if comparison.of(program)
        ]
        parts += [f"## {checkpoint}, {gigabytes:.2f} GB", markdown_table(rows)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, action="append", help="default: all, one after another")
    parser.add_argument("--job", choices=[job.name for job in JOBS], action="append", help="default: all")
    parser.add_argument("--cache", choices=["warm", "cold", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds that count (default 5)")
    parser.add_argument("--common-rounds", type=int, default=2, help="of them with the common script (default 2)")
    parser.add_argument("--scratch", type=Path, help="where the files go, 12 GB free (default: temporary)")
    parser.add_argument("--check", action="store_true", help="only make the checkpoints and prove the round trip")
    default_out = HERE.parent / "docs" / "measurements"
    parser.add_argument("--results", type=Path, default=default_out, help="where convert.json and convert.md go")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")

    caches = ["warm", "cold"] if arguments.cache == "both" else [arguments.cache]
    jobs = [job for job in JOBS if job.name in (arguments.job or [job.name])]
    floor = interpreter_anonymous()
    results: dict[str, list[Comparison]] = {}
    with tempfile.TemporaryDirectory(prefix="tpshard-benchmark-", dir=arguments.scratch) as temporary:
        about = machine(Path(temporary))
        for checkpoint in arguments.checkpoint or CHECKPOINTS:
            scratch = Path(temporary) / checkpoint
            if arguments.check:
                caches = []
            comparisons = list(
                measure_checkpoint(checkpoint, scratch, caches, jobs, arguments.rounds, arguments.common_rounds)
            )
            shutil.rmtree(scratch)
            if comparisons:
                results[checkpoint] = comparisons
                save(arguments.results, results, floor, about)  # after each checkpoint: a late failure loses nothing


def save(directory: Path, results: dict[str, list[Comparison]], floor: int, about: dict[str, str]) -> None:
    """Writes and prints what is known so far."""
    directory.mkdir(parents=True, exist_ok=True)
    page = report(results, floor, about)
    (directory / "convert.md").write_text(page)
    data = {
        "machine": about,
        "idle_interpreter_anonymous": floor,
        "checkpoints": {name: [comparison.as_json() for comparison in rows] for name, rows in results.items()},
    }
    (directory / "convert.json").write_text(json.dumps(data, indent=1) + "\n")
    print(page)


if __name__ == "__main__":
    main()
