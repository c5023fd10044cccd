"""Verification by bytes against plainly reading both sides, and loading a rank's own file against slicing it out.

    python benchmarks/verify.py                             llama-1b (2.5 GB): 5 GB of disk, some minutes
    python benchmarks/verify.py --model tiny --tp 2 --rank 1 --results DIR       seconds, to see that it works

*bytes*: ``tpshard verify SHARDS --against SRC --level bytes`` as a whole process, against a process that does nothing
but read every weight file of both sides once into one buffer a thread, with one thread and with as many as tpshard
uses; everything in the page cache. The bar is a speed of 0.7 of the faster of the two.

*loading*: what a serving process does at its start, timed inside a process that has imported torch already. Either it
reads the rank's own file by position into fresh tensors, or it slices the rank's part of every tensor out of the whole
checkpoint with safetensors' ``get_slice``, and copies it, so that both end with the same tensors in memory. They are
hashed after the clock has stopped, and must be equal. With a warm page cache, and with the files dropped from it.

Programs run in turn, each round in another order, and ratios are formed within a round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import clean_environment, drop_from_cache, machine, put_in_cache, run_once, tpshard_command

HERE = Path(__file__).resolve().parent
BAR = 0.7  # of the speed of reading both sides once
_BUFFER = 4 << 20
_TORCH_OF = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}

Timed = dict[str, list[float]]  # seconds by program, one a round


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory. Not common_script's: the program that only reads must not import torch."""
    return sorted(directory.glob("*.safetensors"))


def read_all(directories: Sequence[Path], threads: int) -> None:
    """Read every weight file of the directories once, in pieces that ``threads`` threads share."""
    pieces = []
    for path in (path for directory in directories for path in weight_files(directory)):
        size = path.stat().st_size
        pieces += [(path, at, min(at + 16 * _BUFFER, size)) for at in range(0, size, 16 * _BUFFER)]

    def work(mine: list[tuple[Path, int, int]]) -> None:
        buffer = memoryview(bytearray(_BUFFER))
        for path, at, end in mine:
            fd = os.open(path, os.O_RDONLY)
            try:
                while at < end:
                    at += os.preadv(fd, [buffer[: min(_BUFFER, end - at)]], at)
            finally:
                os.close(fd)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [pieces[number::threads] for number in range(threads)]))


def load_own(path: Path) -> dict[str, Any]:
    """Every tensor of one rank's file, read by position into memory of its own."""
    import torch

    tensors = {}
    fd = os.open(path, os.O_RDONLY)
    try:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        header = json.loads(os.pread(fd, length, 8))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            raw = torch.empty(end - start, dtype=torch.uint8)
            view, at = memoryview(raw.numpy()), 0
            while at < end - start:
                at += os.preadv(fd, [view[at:]], 8 + length + start + at)
            tensors[name] = raw.view(getattr(torch, _TORCH_OF[entry["dtype"]])).view(entry["shape"])
    finally:
        os.close(fd)
    return tensors


def load_sliced(source: Path, rank: int, tp_size: int) -> dict[str, Any]:
    """One rank's part of every tensor of a whole checkpoint, sliced and copied."""
    from common_script import parallel_dim
    from safetensors import safe_open

    tensors = {}
    for path in weight_files(source):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                view, dim = file.get_slice(name), parallel_dim(name)
                if dim is None:
                    tensors[name] = view[:].clone()
                    continue
                size = view.get_shape()[dim]
                start, stop = size * rank // tp_size, size * (rank + 1) // tp_size
                part = view[start:stop] if dim == 0 else view[:, start:stop]
                tensors[name] = part.clone()
    return tensors


def load(way: str, path: Path, rank: int, tp_size: int) -> dict[str, Any]:
    """Load in one way; returns seconds, bytes and the sha256 of all tensors by name."""
    import torch
    from safetensors import safe_open  # noqa: F401

    torch.set_num_threads(1)
    began = time.perf_counter()
    tensors = load_own(path) if way == "own" else load_sliced(path, rank, tp_size)
    seconds = time.perf_counter() - began
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode())
        state.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    held = sum(tensor.nbytes for tensor in tensors.values())
    return {"seconds": seconds, "bytes": held, "sha256": state.hexdigest()}


def in_turn(programs: dict[str, Callable[[int], float]], rounds: int) -> Timed:
    """Seconds of every program in every round, after one round that does not count."""
    names, out = list(programs), {name: [] for name in programs}  # type: tuple[list[str], Timed]
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            seconds = programs[name](number)
            if number:
                out[name].append(seconds)
                print(f"  {name:34} {seconds:7.3f} s", file=sys.stderr)
    return out


def ratio(timed: Timed, base: str, name: str) -> float:
    """Median over the rounds of ``base / name``: above 1 where ``name`` is faster."""
    return statistics.median(b / n for b, n in zip(timed[base], timed[name], strict=True))


def measure_bytes(source: Path, shards: Path, rounds: int) -> Timed:
    """Verification by bytes, and reading both sides."""
    from tpshard.execute import default_threads

    threads = default_threads()
    itself = [sys.executable, str(HERE / "verify.py")]
    commands = {"tpshard verify --level bytes": [
        tpshard_command(), "verify", str(shards), "--against", str(source), "--level", "bytes", "--no-gates",
    ]}  # fmt: skip
    for count in sorted({1, threads}):
        commands[f"reading both sides, {count} thread{'s' if count > 1 else ''}"] = [
            *itself, "--read", str(source), "--read", str(shards), "--threads", str(count),
        ]  # fmt: skip
    put_in_cache(source)
    put_in_cache(shards)
    programs = {
        name: lambda number, name=name, words=words: run_once(name, number, words).wall
        for name, words in commands.items()
    }
    return in_turn(programs, rounds)


def measure_loading(source: Path, shards: Path, rank: int, tp_size: int, rounds: int, *, cold: bool) -> Timed:
    """Loading one rank in both ways.

    Raises SystemExit where they do not give the same tensors: then the degree cuts elsewhere than a division does.
    """
    digests: dict[str, str] = {}
    own = shards / f"model-tp-{rank:02d}-of-{tp_size:02d}.safetensors"

    def once(way: str, path: Path) -> float:
        for directory in (source, shards):
            (drop_from_cache if cold else put_in_cache)(directory)
        words = ["--load", way, "--path", str(path), "--rank", str(rank), "--tp", str(tp_size)]
        done = subprocess.run(
            [sys.executable, str(HERE / "verify.py"), *words], capture_output=True, text=True, env=clean_environment()
        )
        if done.returncode:
            sys.exit(f"loading ({way}) failed:\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout)
        digests[way] = found["sha256"]
        return float(found["seconds"])

    timed = in_turn({"own file": lambda _: once("own", own), "sliced": lambda _: once("sliced", source)}, rounds)
    if len(set(digests.values())) != 1:
        sys.exit(
            f"both ways must give the same tensors, and do not: {digests}; choose a degree that divides everything"
        )
    return timed


def page(about: dict[str, str], command: str, title: str, reading: Timed, loading: dict[str, Timed], of: str) -> str:
    """The figures as Markdown."""
    verify, *plain = reading
    lines = ["# Verifying by bytes, and loading one rank", ""]
    lines += [f"`{command}`; {title}. `benchmarks/verify.py` says how it measures.", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", "## Bytes: both sides in the page cache, whole processes", ""]
    lines += ["| program | median | least | speed of tpshard verify against it |", "|---|--:|--:|--:|"]
    for name, seconds in reading.items():
        against = "" if name == verify else f"{ratio(reading, name, verify):.2f}"
        lines.append(f"| {name} | {statistics.median(seconds):.3f} s | {min(seconds):.3f} s | {against} |")
    least = min(ratio(reading, name, verify) for name in plain)
    lines += ["", f"The bar is {BAR}: {'held' if least >= BAR else 'NOT HELD'} ({least:.2f})."]
    lines += ["", f"## Loading {of}", ""]
    lines += ["| cache | its own file | sliced out of the whole checkpoint | times as long |", "|---|--:|--:|--:|"]
    for cache, timed in loading.items():
        own, sliced = statistics.median(timed["own file"]), statistics.median(timed["sliced"])
        lines.append(f"| {cache} | {own:.3f} s | {sliced:.3f} s | {ratio(timed, 'sliced', 'own file'):.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="of make_checkpoint.py (default llama-1b)")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7, help="paired rounds that count (default 7)")
    parser.add_argument("--scratch", type=Path, help="where the files go (default: temporary)")
    parser.add_argument("--results", type=Path, default=HERE.parent / "docs" / "measurements", help="for verify.md")
    parser.add_argument("--read", type=Path, action="append", help=argparse.SUPPRESS)  # this and below: one program
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--load", choices=["own", "sliced"], help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read_all(given.read, given.threads)
        return
    if given.load:
        print(json.dumps(load(given.load, given.path, given.rank, given.tp)))
        return
    if given.rounds < 1 or not 0 <= given.rank < given.tp:
        parser.error("--rounds from 1, --rank from 0 and below --tp")
    with tempfile.TemporaryDirectory(prefix="tpshard-benchmark-", dir=given.scratch) as temporary:
        source, shards = Path(temporary) / "source", Path(temporary) / "shards"
        make = [sys.executable, str(HERE / "make_checkpoint.py"), given.model, str(source)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        split = [tpshard_command(), "split", str(source), str(shards), "--tp", str(given.tp)]
        subprocess.run(split, check=True, stdout=subprocess.DEVNULL)
        about = machine(Path(temporary))
        reading = measure_bytes(source, shards, given.rounds)
        loading = {
            "cold" if cold else "warm": measure_loading(
                source, shards, given.rank, given.tp, given.rounds, cold=cold
            )
            for cold in (False, True)
        }  # fmt: skip
        whole, cut = (sum(path.stat().st_size for path in weight_files(at)) for at in (source, shards))
    title = f"{given.model}, {whole / 1e9:.3f} GB, cut into {given.tp} ranks of together {cut / 1e9:.3f} GB"
    given.results.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "benchmarks/verify.py", *sys.argv[1:]])
    made = page(about, command, title, reading, loading, f"rank {given.rank} of {given.tp}")
    (given.results / "verify.md").write_text(made)
    print(made)


if __name__ == "__main__":
    main()
