"""Paired, alternating measurements of whole processes: wall, CPU, peak memory, bytes read from disk. Linux only.

Why this way: a shared machine drifts by tens of percent within a minute, so programs that are to be compared run in
turn, many times, each round in another order, and ratios are formed within a round. Before each run everything dirty is
written back, the inputs are put into (or taken out of) the page cache, and the previous output is deleted at the last
moment: a virtual machine hands freed pages back to its host after a while, and fetching them again costs more than the
copy that is being measured.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.004  # memory is sampled this often; a poll costs about 30 microseconds
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Program:
    """One way of doing the job: ``command(out)`` gives the argument list that writes the directory ``out``."""

    name: str
    command: Callable[[Path], list[str]]
    rounds: int | None = None  # run in the first so many rounds only; None: in all


@dataclass(frozen=True)
class Run:
    """One run of one program. Seconds and bytes."""

    program: str
    round: int
    wall: float
    user: float
    system: float
    peak_rss: int  # highest resident set, file-backed pages included
    peak_anonymous: int  # highest anonymous memory: what the program allocated
    disk_read: int  # bytes that came from the device, not from the page cache
    others: float  # share of the machine's CPU time that other processes used meanwhile

    @property
    def cpu(self) -> float:
        """User and system time together, in seconds."""
        return self.user + self.system


@dataclass
class Comparison:
    """All runs of one row: the same job by several programs, in paired rounds."""

    job: str
    cache: str  # "warm" | "cold"
    input_bytes: int
    runs: list[Run] = field(default_factory=list)

    def of(self, program: str) -> list[Run]:
        """The runs of one program, by round."""
        return [run for run in self.runs if run.program == program]

    def ratio(self, program: str, base: str, value: Callable[[Run], float]) -> float:
        """Median over the rounds that both ran of ``value(program) / value(base)``."""
        bases = {run.round: value(run) for run in self.of(base)}
        return statistics.median(value(run) / bases[run.round] for run in self.of(program) if run.round in bases)

    def ratio_of_minima(self, program: str, base: str, value: Callable[[Run], float]) -> float:
        """``min(value(program)) / min(value(base))`` over all rounds."""
        return min(map(value, self.of(program))) / min(map(value, self.of(base)))

    def as_json(self) -> dict[str, Any]:
        """The row as plain data, every run included."""
        return {
            "job": self.job,
            "cache": self.cache,
            "input_bytes": self.input_bytes,
            "runs": [asdict(run) for run in self.runs],
        }


def tpshard_command() -> str:
    """The installed ``tpshard`` script beside this interpreter. Exits with a message where there is none."""
    found = shutil.which("tpshard", path=str(Path(sys.executable).parent))
    if found is None:
        sys.exit("benchmarks measure the installed command: run `pip install .` with this interpreter first")
    return found


def clean_environment() -> dict[str, str]:
    """The environment of a measured process: byte code is cached, as it is for anyone who installed the package."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def files_under(root: Path) -> list[Path]:
    """Every regular file under ``root``, sorted."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def size_of(root: Path) -> int:
    """Total size in bytes of the files under ``root``."""
    return sum(path.stat().st_size for path in files_under(root))


def put_in_cache(root: Path) -> None:
    """Reads every file under ``root`` once, so that the next reader finds it in the page cache."""
    buffer = bytearray(4 << 20)
    for path in files_under(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_from_cache(root: Path) -> None:
    """Takes the files under ``root`` out of the page cache (``posix_fadvise(POSIX_FADV_DONTNEED)``).

    Only these files: the interpreter and its libraries stay cached, and nobody else's files are touched. Whether it
    worked shows in :attr:`Run.disk_read`.
    """
    for path in files_under(root):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def run_once(name: str, round_number: int, command: Sequence[str]) -> Run:
    """Runs ``command`` to its end and measures it.

    Raises SystemExit with the program's last output where it fails: a failed run has no time.
    """
    peak_rss = peak_anonymous = disk_read = 0
    with tempfile.TemporaryFile() as log:
        busy_before = _busy_seconds()
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=clean_environment()
        )
        pidfd = os.pidfd_open(process.pid)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        try:
            while not poller.poll(POLL_SECONDS * 1000):
                rss, anonymous = _memory(process.pid)
                peak_rss = max(peak_rss, rss)
                peak_anonymous = max(peak_anonymous, anonymous)
            wall = time.perf_counter() - start
            disk_read = _disk_read(process.pid)  # the process has ended and is not reaped yet: its counters are whole
        finally:
            os.close(pidfd)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        own = usage.ru_utime + usage.ru_stime
        others = max(0.0, _busy_seconds() - busy_before - own) / (wall * (os.cpu_count() or 1))
        if process.returncode != 0:
            log.seek(0)
            tail = log.read()[-3000:].decode(errors="replace")
            sys.exit(f"{name} failed with status {process.returncode}: {' '.join(command)}\n{tail}")
    return Run(
        name, round_number, wall, usage.ru_utime, usage.ru_stime, peak_rss, peak_anonymous, disk_read, min(others, 1.0)
    )


def compare(
    job: str, source: Path, programs: Sequence[Program], scratch: Path, *, rounds: int, cold: bool
) -> Comparison:
    """Runs every program on ``source`` in turn, ``rounds`` times after one round that is not counted.

    Each writes a fresh directory under ``scratch``, which is deleted when the next run starts.
    """
    comparison = Comparison(job, "cold" if cold else "warm", size_of(source))
    out = scratch / "out"
    for round_number in range(rounds + 1):
        shift = round_number % len(programs)
        for program in [*programs[shift:], *programs[:shift]]:
            # The uncounted round fills caches, byte code and the page pool; a yardstick with few rounds needs none.
            if program.rounds is not None and not 1 <= round_number <= program.rounds:
                continue
            os.sync()
            (drop_from_cache if cold else put_in_cache)(source)
            shutil.rmtree(out, ignore_errors=True)
            run = run_once(program.name, round_number, program.command(out))
            if round_number:
                comparison.runs.append(run)
                print(
                    f"  {job:16} {comparison.cache} {program.name:14} {run.wall:6.2f} s wall {run.cpu:6.2f} s CPU "
                    f"{run.peak_anonymous / 2**20:6.0f} MiB anonymous",
                    file=sys.stderr,
                )
    shutil.rmtree(out, ignore_errors=True)
    return comparison


def interpreter_anonymous() -> int:
    """Peak anonymous memory in bytes of this Python doing nothing: the floor under every Python program."""
    idle = [sys.executable, "-c", "import time; time.sleep(0.2)"]
    return min(run_once("idle", number, idle).peak_anonymous for number in range(3))


def machine(scratch: Path) -> dict[str, str]:
    """What the figures were measured on: processor, memory, kernel, file system of ``scratch``, versions."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stat = ["stat", "-f", "-c", "%T", str(scratch)]
    filesystem = subprocess.run(stat, capture_output=True, text=True, check=True).stdout.strip()
    copy = subprocess.run(["cp", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "processor": processor,
        "cores": str(os.cpu_count()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": filesystem,
        "python": platform.python_version(),
        "tpshard": _installed(),
        "cp": copy,
        "date": time.strftime("%Y-%m-%d"),
    }


def _installed() -> str:
    """Version of the package that is measured, and whether its imports pass through an editable install's finder."""
    distribution = metadata.distribution("tpshard")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    editable = origin.get("dir_info", {}).get("editable", False)
    return f"{distribution.version}, {'editable' if editable else 'ordinary'} install"


def _busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used since boot (idle and waiting for I/O excluded)."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


def _memory(pid: int) -> tuple[int, int]:
    """Highest resident set so far and anonymous memory now, in bytes; zeros where the process is gone.

    ``VmHWM`` rather than the kernel's ``ru_maxrss``, which a child inherits from the process that started it.
    """
    high = anonymous = 0
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            high = int(line.split()[1]) << 10
        elif line.startswith("RssAnon:"):
            anonymous = int(line.split()[1]) << 10
    return high, anonymous


def _disk_read(pid: int) -> int:
    """Bytes that the process caused to be read from a device, 0 where the kernel does not tell."""
    try:
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except OSError:
        return 0
    return 0
