"""One process a rank: how they start, find each other, fail together, and exchange tensors.

Either this process starts them all (one plain command), or ``torchrun`` has started them and every process
runs the same command. Processes tell each other of failures through the store by which they met, so that
all end within seconds and all say the same.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpshard import errors
from tpshard.errors import DamagedError, StorageError, TpshardError, UnsupportedError, UsageError
from tpshard.manifest import Manifest
from tpshard.opened import open_weights

from .exchange import Tally
from .stores import Part, Store

TIMEOUT = 120.0  # seconds that a rank waits for another in one collective
GRACE = 5.0  # seconds for the other ranks to end by themselves after one has failed
REPORTING = 30.0  # seconds that rank 0 may take to write its reports
POLL = 0.05
LOG_TAIL = 600
WORKER = "tpshard.numerics.worker"
FORKS = sys.platform == "linux"  # whether ranks are forked from one process that has imported torch


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str


def place_of(rank: int, size: int, local_rank: int, local_size: int, device: str) -> Place:
    """The device and backend of a rank: NCCL with a GPU for every rank, else gloo.

    Several ranks on one GPU use gloo and exchange through the host.

    Raises:
        UnsupportedError: a GPU was asked for and there is none.
        UsageError: it is no device.
    """
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"'{device}' is not a device; choose cpu or cuda")
    if device == "cpu":
        return Place(rank, size, local_rank, torch.device("cpu"), "gloo")
    if not torch.cuda.is_available():
        raise UnsupportedError("there is no CUDA device, or this torch was built without CUDA; use --device cpu")
    count = torch.cuda.device_count()
    each = count >= local_size and dist.is_nccl_available()
    return Place(rank, size, local_rank, torch.device("cuda", local_rank % count), "nccl" if each else "gloo")


class Failed(StorageError):
    """A rank failed; the message says which. Its exit status is the failed rank's own where that is known."""


class ProcessGroup:
    """The ranks' process group, with a side channel for objects and failures. A context manager.

    Args:
        store: through which the ranks meet.
    """

    def __init__(self, place: Place, store: Any, timeout: float = TIMEOUT) -> None:
        self.place, self.store = place, store
        self._timeout = datetime.timedelta(seconds=timeout)

    def __enter__(self) -> ProcessGroup:
        place = self.place
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        dist.init_process_group(
            place.backend, store=dist.PrefixStore("group", self.store), rank=place.rank, world_size=place.size,
            timeout=self._timeout,
        )  # fmt: skip
        self.objects = dist.new_group(backend="gloo", timeout=self._timeout) if place.backend != "gloo" else None
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._report(error)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _report(self, error: BaseException) -> None:
        """Tell the others, unless they told first; raise what is to be said."""
        mine = self.store.add("failures", 1) == 1
        if mine and not _is_lost(error):
            name = type(error).__name__ if isinstance(error, TpshardError) else ""
            text = str(error) if name else f"{type(error).__name__}: {error}"
            self.store.set("failure", json.dumps([self.place.rank, name, " ".join(text.split())]))
            return
        told = self._told()
        if told is not None and told[0] != self.place.rank:
            rank, name, text = told
            known = getattr(errors, name, None) if name else None
            if known is not None:
                raise known(text) from error
            raise Failed(f"rank {rank} failed: {text:.{LOG_TAIL}}") from error
        if _is_lost(error):
            text = " ".join(str(error).split())
            raise Failed(f"rank {self.place.rank} lost the other ranks; one of them has died: {text:.300}") from error

    def _told(self) -> Any:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            try:
                if self.store.check(["failure"]):
                    return json.loads(self.store.get("failure"))
            except RuntimeError:
                return None
            time.sleep(POLL)
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        out: list[Any] = [None] * self.place.size
        dist.all_gather_object(out, value, group=self.objects)
        return out

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather_objects(None)


def _is_lost(error: BaseException) -> bool:
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, torch.OutOfMemoryError)
        and any(
            word in str(error).lower()
            for word in ("connection", "gloo", "nccl", "timed out", "peer", "socket", "broken pipe")
        )
    )


def leave_together(store: Any, rank: int) -> None:
    """At the end of a process under torchrun: wait for rank 0, which reports.

    torchrun ends all processes as soon as one ends with a failure, also where all are about to.
    """
    try:
        if rank == 0:
            store.set("reported", "yes")
        else:
            store.wait(["reported"], datetime.timedelta(seconds=REPORTING))
    except RuntimeError:  # the store is gone, and so are the others
        return


class ProcessExchange:
    """A rank that is a process of a :class:`ProcessGroup`."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size, self.tally = group.place.rank, group.place.size, Tally()
        self._staged = group.place.backend == "gloo" and group.place.device.type == "cuda"

    def all_reduce(self, tensor: torch.Tensor, point: str) -> torch.Tensor:
        out = tensor.detach().cpu() if self._staged else tensor.detach().clone()
        out = out.contiguous()
        dist.all_reduce(out)
        return out.to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, point: str) -> list[torch.Tensor]:
        own = tensor.detach().cpu() if self._staged else tensor.detach()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous())
        return [part.to(tensor.device) for part in parts]


def own_store(root: Path, manifest: Manifest, rank: int) -> Store:
    """What one rank stores, from that rank's own files alone: no other file of the directory is opened.

    Raises:
        DamagedError: a file is not the rank's, or not of this split.
        StorageError: it cannot be read.
    """
    layout = {stored.name: stored for stored in manifest.layout.stored}
    parts: dict[str, Part] = {}
    paths = []
    for number, recorded in enumerate(file for file in manifest.files if file.rank == rank):
        opened, _ = open_weights(root, recorded.name, "safetensors")
        paths.append(root / recorded.name)
        for info in opened.tensors:
            stored = layout.get(info.name)
            if stored is None or stored.shape(rank) != info.shape or stored.dtype != info.dtype:
                raise DamagedError(
                    f"{recorded.name} holds {info.name} as {info.dtype} {list(info.shape)}, which is not what "
                    "tpshard.json says; split again"
                )
            parts[info.name] = Part(info.name, info.dtype, number, info.offset, stored.pieces[0].cut, rank)
    return Store(paths, parts)


class _Started:
    """The ranks' processes: forked from one that has imported everything, or each by itself."""

    def __init__(self, root: Path, size: int, forks: bool, environment: dict[str, str]) -> None:
        self.root, self.size, self.forks = root, size, forks
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in (None,) if forks else range(size):
            last = [] if rank is None else [str(rank)]
            with (root / ("log" if rank is None else f"log-{rank}")).open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", WORKER, str(root), str(size), *last], stdin=subprocess.DEVNULL,
                        stdout=log, stderr=log, env=environment, start_new_session=forks,
                    )
                )  # fmt: skip

    def codes(self) -> list[int | None]:
        """The exit status of every rank, negative for a signal; None while it runs."""
        codes = [process.poll() for process in self._processes]
        if not self.forks:
            return codes
        left = [self.root / f"code-{rank}" for rank in range(self.size)]
        return [_loaded(path) if path.exists() else codes[0] for path in left]

    def said(self, rank: int) -> str:
        """The end of what a rank printed, or of what the process before it did."""
        logs = (self.root / f"log-{rank}", self.root / "log")
        text = next((path.read_bytes() for path in logs if path.exists() and path.stat().st_size), b"")
        return " ".join(text[-LOG_TAIL:].decode("utf-8", "replace").split())

    def end(self) -> None:
        """Kill what still runs, and wait."""
        for process in self._processes:
            try:
                if self.forks:
                    os.killpg(process.pid, signal.SIGKILL)
                elif process.poll() is None:
                    process.kill()
            except ProcessLookupError:
                pass
            process.wait()


def run_all(size: int, task: dict[str, Any]) -> Any:
    """Start ``size`` processes of this program on ``task``, and return what rank 0 gives.

    Raises:
        StorageError: a rank died; the others were ended, and the message says which it was and how.
        TpshardError: what a rank raised.
    """
    with tempfile.TemporaryDirectory(prefix="tpshard-ranks-") as directory:
        root = Path(directory)
        (root / "task").write_bytes(pickle.dumps(task))
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        threads = max(1, (os.cpu_count() or 1) // size)
        environment["OMP_NUM_THREADS"] = str(threads)
        # A process that has asked for a GPU cannot be forked, and imports may ask; macOS forbids it as well.
        forks = FORKS and task.get("device", "cpu") == "cpu"
        started = _Started(root, size, forks, environment)
        try:
            _await(started)
        finally:
            started.end()
        return _loaded(root / "result-0")


def _await(started: _Started) -> None:
    """Wait until all have ended well; raise as soon as one has not, after a moment for the others."""
    root, first, until = started.root, None, 0.0
    while True:
        codes = started.codes()
        bad = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if not bad and all(code == 0 for code in codes):
            return
        if bad and first is None:
            first, until = bad[0], time.monotonic() + GRACE
        if first is not None and (all(code is not None for code in codes) or time.monotonic() > until):
            break
        time.sleep(POLL)
    # A rank that was killed left no word of its own; what the others say of it is only that it is gone.
    silent = [
        rank for rank, code in enumerate(codes) if code not in (None, 0) and not (root / f"error-{rank}").exists()
    ]
    if silent:
        rank = silent[0]
        code = codes[rank] or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        tail = started.said(rank)
        said = f"; it said: {tail}" if tail else ""
        raise Failed(f"rank {rank} died ({how}) and the other ranks were ended: no verdict{said}")
    assert first is not None
    left = [_loaded(path) for rank in range(started.size) if (path := root / f"error-{rank}").exists()]
    raise next((error for error in left if not isinstance(error, Failed)), left[0])


def _loaded(path: Path) -> Any:
    return pickle.loads(path.read_bytes())  # from a directory of this process' own
