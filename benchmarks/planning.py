"""Fixed costs: start-up, a tiny split, planning 10,000 tensors for 8 ranks, and the share of the digests.

    python benchmarks/planning.py [--rounds 15] [--digest-rounds 7] [--results DIR]

Prints tables and writes planning.json and planning.md to docs/measurements/. Processes alternate; medians and minima
over all rounds. Planning is measured on a checkpoint whose files hold headers and holes, since no tensor byte
is read. The digests are measured by moving the bytes of the Llama-3.2-1B shape with and without them in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from make_checkpoint import make_checkpoint
from measure import clean_environment, machine, put_in_cache, run_once, tpshard_command

HERE = Path(__file__).resolve().parent
DIGESTS = ("none", "xxh3_128", "sha256")
Samples = dict[str, list[float]]


def measure_processes(scratch: Path, rounds: int) -> tuple[Samples, Samples]:
    """Wall and CPU seconds, from start to end, of whole commands in turn; the first round is not counted."""
    tiny, many, out = scratch / "tiny", scratch / "many", scratch / "out"
    tpshard = tpshard_command()
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "tpshard --help": [tpshard, "--help"],
        "cp -r TINY OUT": ["cp", "-r", str(tiny), str(out)],
        "tpshard split TINY OUT --tp 2": [tpshard, "split", str(tiny), str(out), "--tp", "2"],
        "tpshard plan MANY --tp 8": [tpshard, "plan", str(many), "--tp", "8"],
    }
    wall: Samples = {name: [] for name in commands}
    cpu: Samples = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            shutil.rmtree(out, ignore_errors=True)
            run = run_once(name, number, command)
            if number:
                wall[name].append(run.wall)
                cpu[name].append(run.cpu)
    shutil.rmtree(out, ignore_errors=True)
    return wall, cpu


def measure_planning(many: Path, rounds: int) -> tuple[int, Samples]:
    """The number of tensors, and seconds by phase of planning them for 8 ranks, each time in a fresh process."""
    samples: Samples = {}
    tensors = 0
    for number in range(rounds + 1):
        seconds = in_process("plan", str(many), "8")
        tensors = int(seconds.pop("tensors"))
        seconds["all of it"] = sum(seconds.values())
        if number:
            for phase, value in seconds.items():
                samples.setdefault(phase, []).append(value)
    return tensors, samples


def measure_digests(source: Path, scratch: Path, rounds: int) -> tuple[Samples, Samples]:
    """Wall and CPU seconds of moving the bytes of a split to 8, with no digests and with either, in turn."""
    wall: Samples = {digest: [] for digest in DIGESTS}
    cpu: Samples = {digest: [] for digest in DIGESTS}
    out = scratch / "out"
    for number in range(rounds + 1):
        shift = number % len(DIGESTS)
        for digest in [*DIGESTS[shift:], *DIGESTS[:shift]]:
            os.sync()
            put_in_cache(source)
            shutil.rmtree(out, ignore_errors=True)
            seconds = in_process("move", str(source), str(out), "8", digest)
            if number:
                wall[digest].append(seconds["move"])
                cpu[digest].append(seconds["cpu"])
    shutil.rmtree(out, ignore_errors=True)
    return wall, cpu


def in_process(*arguments: str) -> dict[str, float]:
    """What in_process.py prints for these arguments; SystemExit with its messages where it fails."""
    command = [sys.executable, str(HERE / "in_process.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown pipe table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def figures(samples: Sequence[float]) -> list[str]:
    """Median and minimum, in seconds."""
    return [f"{statistics.median(samples):.3f}", f"{min(samples):.3f}"]


def shares(samples: Samples, digest: str) -> list[str]:
    """What a digest adds to moving the bytes without: median over paired rounds, and by the minima."""
    paired = statistics.median(one / none for one, none in zip(samples[digest], samples["none"], strict=True))
    return [f"{paired - 1:+.1%}", f"{min(samples[digest]) / min(samples['none']) - 1:+.1%}"]


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of start-up and planning (default 15)")
    parser.add_argument("--digest-rounds", type=int, default=7, help="of moving 2.5 GB (default 7; 0: leave it out)")
    parser.add_argument("--scratch", type=Path, help="where the files go, 6 GB free (default: temporary)")
    default_out = HERE.parent / "docs" / "measurements"
    parser.add_argument("--results", type=Path, default=default_out, help="where planning.json and planning.md go")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")

    with tempfile.TemporaryDirectory(prefix="tpshard-benchmark-", dir=arguments.scratch) as temporary:
        scratch = Path(temporary)
        about = machine(scratch)
        make_checkpoint("tiny", scratch / "tiny")
        make_checkpoint("many-experts", scratch / "many", sparse=True)
        wall, cpu = measure_processes(scratch, arguments.rounds)
        tensors, phases = measure_planning(scratch / "many", arguments.rounds)
        moved: Samples = {}
        moved_cpu: Samples = {}
        if arguments.digest_rounds:
            make_checkpoint("llama-1b", scratch / "llama-1b")
            moved, moved_cpu = measure_digests(scratch / "llama-1b", scratch, arguments.digest_rounds)

    parts = [
        "# Fixed costs: start-up, planning, digests",
        "Written by `python benchmarks/planning.py`, which says how it measures; every sample is in `planning.json`.",
        "\n".join(f"- {key}: {value}" for key, value in about.items()),
        f"## Whole processes, {arguments.rounds} alternating rounds",
        f"TINY is 21 tensors in 0.3 MB; MANY is {tensors:,} tensors in 4 files.",
        table(
            ("command", "wall s, median", "min", "CPU s, median", "min"),
            [[f"`{name}`", *figures(wall[name]), *figures(cpu[name])] for name in wall],
        ),
        f"## Planning {tensors:,} tensors for 8 ranks, inside the process",
        table(("phase", "wall s, median", "min"), [[phase, *figures(samples)] for phase, samples in phases.items()]),
    ]
    if moved:
        parts += [
            f"## Digests of everything read and written, 2.47 GB split to 8, {arguments.digest_rounds} rounds",
            "Moving the bytes only (warm cache); CPU is the whole process.",
            table(
                (
                    *("digest", "wall s, median", "min", "more wall, paired", "by minima"),
                    *("CPU s, median", "min", "more CPU, paired", "by minima"),
                ),
                [
                    [
                        digest,
                        *(*figures(moved[digest]), *shares(moved, digest)),
                        *(*figures(moved_cpu[digest]), *shares(moved_cpu, digest)),
                    ]
                    for digest in DIGESTS
                ],
            ),
        ]
    page = "\n\n".join(parts) + "\n"
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "planning.md").write_text(page)
    data = {"machine": about, "tensors": tensors, "wall": wall, "cpu": cpu, "phases": phases}
    data |= {"digest_wall": moved, "digest_cpu": moved_cpu}
    (arguments.results / "planning.json").write_text(json.dumps(data, indent=1) + "\n")
    print(page)


if __name__ == "__main__":
    main()
