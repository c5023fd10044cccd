"""Export to every engine that takes the model, against `cp -r` of the very directory that it writes.

    python benchmarks/export.py                                  llama-1b and mixtral (2.5 GB each), TP 4: some minutes
    python benchmarks/export.py --checkpoint tiny --rounds 1     seconds, to see that it works
    python benchmarks/export.py --engine vllm --engine megatron --tp 8

An export reads a checkpoint and writes the engine's files, digests of everything included; `cp -r` copies those files,
so that both write the same bytes (replicas, padding and a head that is written out are among them). Both inputs are in
the page cache. The two run in turn, and ratios are medians over the rounds; the ratio of the two minima stands in
brackets. Each export is verified against its checkpoint byte by byte before anything is measured: a wrong result has
no speed. Prints a table, and writes export.json (every run) and export.md to docs/measurements/; 8 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from convert import run_quietly
from make_checkpoint import KINDS, make_checkpoint
from measure import (
    Comparison,
    Program,
    clean_environment,
    compare,
    interpreter_anonymous,
    machine,
    size_of,
    tpshard_command,
)

CP, EXPORT = "cp -r", "tpshard"
REFUSED = 3  # exit status of what an engine cannot load
BAR = 1.5  # of the time of cp


def engine_names() -> list[str]:
    """The engines that the installed command knows."""
    listed = subprocess.run(
        [tpshard_command(), "list", "engines", "--json"], capture_output=True, text=True, check=True
    ).stdout
    return [entry["name"] for entry in json.loads(listed)["entries"]]


def measured(checkpoint: str, engine: str, tp_size: int, scratch: Path, rounds: int) -> tuple[Comparison, int] | None:
    """All runs of one engine, and the bytes that it is written in; None where it does not take the model."""
    inputs = scratch / "inputs"
    source, written = inputs / "hf", inputs / "written"
    command = [tpshard_command(), "export", str(source)]
    options = ["--engine", engine, "--tp", str(tp_size)]
    first = subprocess.run(
        [*command, str(written), *options], capture_output=True, text=True, env=clean_environment(), check=False
    )
    if first.returncode == REFUSED:
        print(f"  {engine}: {first.stderr.strip()[:200]}", file=sys.stderr)
        return None
    if first.returncode:
        sys.exit(f"{engine} failed with status {first.returncode}:\n{first.stderr[-3000:]}")
    if "model_type" in (written / "config.json").read_text():  # else it is the engine's own, which verify cannot use
        run_quietly([tpshard_command(), "verify", str(written), "--against", str(source), "--level", "bytes"])
    programs = [
        Program(CP, lambda out: ["cp", "-r", str(written), str(out)]),
        Program(EXPORT, lambda out: [*command, str(out), *options]),
    ]
    nbytes = size_of(written)
    comparison = compare(f"{checkpoint} {engine}", inputs, programs, scratch, rounds=rounds, cold=False)
    shutil.rmtree(written)
    return comparison, nbytes


def row_of(comparison: Comparison, nbytes: int, floor: int) -> list[str]:
    """An engine's line in the table; ``floor`` is the interpreter's own anonymous memory in bytes."""
    copies, exports = comparison.of(CP), comparison.of(EXPORT)
    checkpoint, engine = comparison.job.split()

    def against_cp(value: str) -> str:
        median = comparison.ratio(EXPORT, CP, lambda run: getattr(run, value))
        return f"{median:.2f} ({comparison.ratio_of_minima(EXPORT, CP, lambda run: getattr(run, value)):.2f})"

    return [
        checkpoint,
        engine,
        f"{nbytes / 1e9:.2f}",
        f"{min(run.wall for run in copies):.2f}",
        f"{min(run.wall for run in exports):.2f}",
        against_cp("wall"),
        f"{(max(run.peak_anonymous for run in exports) - floor) / 2**20:.0f}",
        f"{max(run.peak_rss for run in exports) / 2**20:.0f}",
        f"{max(run.others for run in (*copies, *exports)):.0%}",
    ]


def report(rows: Sequence[Sequence[str]], about: dict[str, str], tp_size: int, rounds: int) -> str:
    """The page."""
    head = [
        "checkpoint", "engine", "GB written", "cp, s", "export, s", "export / cp", "MiB above idle", "peak RSS, MiB",
        "others' CPU, at most",
    ]  # fmt: skip
    lines = [f"- {key}: {value}" for key, value in about.items()]
    told = (
        f"Exports at TP {tp_size} by `benchmarks/export.py`, {rounds} paired rounds, warm cache. Seconds are minima; "
        f"export / cp is the median of the rounds' ratios, with the ratio of the minima in brackets; the bar is {BAR}."
    )
    table = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n\n".join(["# Exports against cp", told, "\n".join(lines), "\n".join(table)]) + "\n"


def all_runs(
    checkpoints: Sequence[str], engines: Sequence[str], tp_size: int, rounds: int, place: Path | None
) -> Iterator[tuple[Comparison, int]]:
    for checkpoint in checkpoints:
        with tempfile.TemporaryDirectory(prefix="tpshard-benchmark-", dir=place) as temporary:
            make_checkpoint(checkpoint, Path(temporary) / "inputs" / "hf")
            for engine in engines:
                found = measured(checkpoint, engine, tp_size, Path(temporary), rounds)
                if found is not None:
                    yield found


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", choices=KINDS, action="append", help="default: llama-1b and mixtral")
    parser.add_argument("--engine", action="append", help="default: every one that takes the model")
    parser.add_argument("--tp", type=int, default=4, help="degree (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds that count (default 5)")
    parser.add_argument("--scratch", type=Path, help="where the files go, 8 GB free (default: temporary)")
    default_out = Path(__file__).resolve().parent.parent / "docs" / "measurements"
    parser.add_argument("--results", type=Path, default=default_out, help="where export.json and export.md go")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    floor, about = interpreter_anonymous(), machine(arguments.scratch or Path(tempfile.gettempdir()))
    rows, runs = [], []
    arguments.results.mkdir(parents=True, exist_ok=True)
    checkpoints = arguments.checkpoint or ["llama-1b", "mixtral"]
    for comparison, nbytes in all_runs(
        checkpoints, arguments.engine or engine_names(), arguments.tp, arguments.rounds, arguments.scratch
    ):
        rows.append(row_of(comparison, nbytes, floor))
        runs.append({**comparison.as_json(), "input_bytes": nbytes})
        page = report(rows, about, arguments.tp, arguments.rounds)
        (arguments.results / "export.md").write_text(page)  # after each engine: a late failure loses nothing
        data = {"machine": about, "idle_interpreter_anonymous": floor, "exports": runs}
        (arguments.results / "export.json").write_text(json.dumps(data, indent=1) + "\n")
    print(page if rows else "no engine takes this model at this degree")


if __name__ == "__main__":
    main()
