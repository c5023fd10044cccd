"""What digests, journal and commit cost together: a split with all of them against the same one with none.

    python benchmarks/journal.py SRC SCRATCH [--tp 8] [--repeats 7]

SRC is a checkpoint (``benchmarks/make_checkpoint.py llama-1b``), SCRATCH a directory on the file system to measure.
Both programs are run in turn, each in a process of its own with the source in the page cache: *all* is ``split`` as
it is; *none* moves the bytes of the same plan and writes the same headers, side files and manifest straight into a
new directory, without digest, journal, lock, staging or rename. The ratio is that of the medians, and the medians of
the pairs' ratios are printed beside it; time is from the first call of ``split`` to its return.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType


class Bare:
    """A directory made where it is to be."""

    published = False

    def __init__(self, out: Path, **how: object) -> None:
        self.out = self.path = out
        self.keep = False

    def __enter__(self) -> Bare:
        self.path.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def publish(self) -> None:
        """It is there already."""


def run(source: str, out: str, tp_size: int, how: str) -> None:
    """Split once in this process, and print the seconds."""
    from tpshard import output, split
    from tpshard.options import Options
    from tpshard.registry import families

    families()
    if how == "none":
        output.Staging = Bare  # type: ignore[assignment, misc]
    begun, used = time.perf_counter(), time.process_time()
    split(source, out, tp_size, options=Options(algorithm="" if how == "none" else "xxh3_128"))
    print(json.dumps([time.perf_counter() - begun, time.process_time() - used]))


def measured(source: Path, out: Path, tp_size: int, how: str) -> tuple[float, float]:
    """Wall and processor seconds of one split in a new process; its output is deleted."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, str(source), str(out), "--tp", str(tp_size), "--once", how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    wall, cpu = json.loads(done.stdout)
    return float(wall), float(cpu)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--once", choices=["all", "none"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        run(str(arguments.source), str(arguments.scratch), arguments.tp, arguments.once)
        return
    out = arguments.scratch / "journal-benchmark-out"
    for path in arguments.source.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass
    times: dict[str, list[tuple[float, float]]] = {"all": [], "none": []}
    for number in range(arguments.repeats + 1):
        for how in ("all", "none") if number % 2 else ("none", "all"):
            wall, cpu = measured(arguments.source, out, arguments.tp, how)
            if number:  # the first pair warms up
                times[how].append((wall, cpu))
                print(f"{number} {how:4} {wall:.3f} s wall, {cpu:.3f} s CPU", file=sys.stderr)
    total = sum(path.stat().st_size for path in arguments.source.iterdir())
    print(f"{total / 1e9:.2f} GB to {arguments.tp} ranks, {arguments.repeats} pairs")
    for at, what in enumerate(("wall", "CPU")):
        every, none = ([pair[at] for pair in times[how]] for how in ("all", "none"))
        pairs = statistics.median(a / b for a, b in zip(every, none, strict=True))
        print(
            f"{what:4} with digests, journal and commit {statistics.median(every):.3f} s, without "
            f"{statistics.median(none):.3f} s: {pairs - 1:+.1%} by the median of pairs, "
            f"{min(every) / min(none) - 1:+.1%} by the fastest"
        )


if __name__ == "__main__":
    main()
