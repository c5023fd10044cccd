"""What a long job tells those who watch it: events as JSON lines, and metrics for Prometheus.

An event is a JSON object a line with ``time`` (UTC, ISO 8601) and ``event``: ``start``, ``plan``, ``heartbeat``,
``note``, ``file``, ``end``. ``end`` has a ``summary`` that depends on the input and the options alone, so that two
runs can be compared, and beside it what was measured. Metrics are written whole, by a rename, in the text format
that node_exporter's textfile collector reads. A log or metrics file that cannot be written is said once, and the
job goes on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from .digest import digest_of
from .errors import StorageError
from .listing import shown
from .prometheus import exposition
from .release import VERSION

if TYPE_CHECKING:
    from .execute import Outcome
    from .planning import Plan
    from .reports import Conversion

SCHEMA = 1
HEARTBEAT = 30.0  # seconds


class Observer:
    """Writes events to ``log`` (a path, or ``-`` for stdout) and metrics to ``metrics``; a context manager.

    Args:
        verb: the operation.
        heartbeat: seconds between signs of life.
        note: told once where a file cannot be written.

    Raises:
        StorageError: on entering, a file that cannot be made.
    """

    def __init__(
        self, verb: str, *, log: str | None = None, metrics: str | None = None, heartbeat: float = HEARTBEAT,
        note: Callable[[str], None] = lambda message: None,
    ) -> None:  # fmt: skip
        self._verb = verb
        self._log = log
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._note = note
        self._fd = -1
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="tpshard-heartbeat", daemon=True)
        self._begun = self._moved_at = time.monotonic()
        self._began = time.time()
        self._total = self._done = 0
        self._summary: dict[str, Any] = {}
        self._labels: dict[str, str] = {"verb": verb}
        self._report: Conversion | None = None

    def __enter__(self) -> Observer:
        if self._log is not None:
            self._fd = 1 if self._log == "-" else _opened(self._log)
        self.emit("start", schema=f"tpshard.events/{SCHEMA}", tpshard=VERSION, verb=self._verb, process=os.getpid())
        if self._metrics is not None:
            try:
                self._write_metrics(running=True)
            except OSError as error:
                raise _refused(self._metrics, error) from None
        self._pulse.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        self._ended.set()
        self._pulse.join()
        status = 0 if value is None else int(getattr(value, "exit_status", 70))
        seconds = time.monotonic() - self._begun
        report = self._report
        if report is not None:
            self._summary |= {"content": report.content, "warnings": list(report.warnings)}
        self.emit(
            "end", status=status, error=None if value is None else str(value), summary=self._summary,
            seconds=round(seconds, 3), bytes=self._done, bytes_kept=self._kept, rate=self._rate(),
            peak_resident_bytes=_peak(),
        )  # fmt: skip
        self._export(running=False, status=status)
        if self._fd > 2:
            os.close(self._fd)

    def emit(self, event: str, **values: Any) -> None:
        """Write an event."""
        if self._fd < 0:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = json.dumps({"time": now, "event": event, **values}, ensure_ascii=True)
        rest = memoryview(f"{text}\n".encode())
        with self._lock:
            try:
                if self._fd == 1:
                    sys.stdout.flush()
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError as error:
                self._fd = -1
                self._note(f"{shown(self._log or '-')}: the log ends here: {error.strerror or error}")

    def noting(self, message: str) -> None:
        """A message for the user."""
        self.emit("note", message=message)

    # -- of a conversion ---------------------------------------------------------------------

    def planned(self, report: Conversion) -> None:
        """What is about to be done."""
        self._report = report
        self._labels |= {"source": report.source, "output": report.output}
        self._summary = {
            "verb": report.verb, "family": report.family, "from_tp_size": report.from_tp_size,
            "to_tp_size": report.to_tp_size, "tensors": report.tensors, "layout": report.layout,
            "algorithm": report.algorithm, "needed_bytes": report.needed_bytes,
        }  # fmt: skip
        self.emit("plan", source=report.source, output=report.output, **self._summary)

    @contextmanager
    def moving(
        self, total: int, shown: AbstractContextManager[Callable[[int], None] | None]
    ) -> Iterator[Callable[[int], None]]:
        """A context manager around the function that is told of ``total`` bytes as they are done."""
        self._total, self._done, self._moved_at = total, 0, time.monotonic()
        with shown as progress:

            def advance(done: int) -> None:
                self._done += done
                if progress is not None:
                    progress(done)

            yield advance

    def made(self, plan: Plan, outcome: Outcome) -> None:
        """What has become visible: an event for every file of tensors, with one digest over those of its tensors."""
        digest = digest_of(self._summary["algorithm"]) if self._summary.get("algorithm") else None
        rows: list[list[int]] = [[] for _ in plan.target.files]
        for number, extent in enumerate(plan.writes):
            rows[extent.file].append(number)
        files = []
        for file, row in zip(plan.target.files, rows, strict=True):
            told = "".join(outcome.write_digests[number] or "" for number in row)
            values = {
                "file": file.name, "rank": file.rank, "bytes": file.size, "tensors": len(row),
                "digest": digest(memoryview(told.encode())) if digest else "",
            }  # fmt: skip
            self.emit("file", **values)
            files.append(values)
        self._summary["files"] = files

    # -- signs of life -----------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat):
            rate = self._rate()
            left = (self._total - self._done) / rate if rate else None
            self.emit(
                "heartbeat", seconds=round(time.monotonic() - self._begun, 3), bytes=self._done, of_bytes=self._total,
                rate=rate, seconds_left=None if left is None else round(left, 1),
            )  # fmt: skip
            self._export(running=True)

    @property
    def _kept(self) -> int:
        """Bytes that an earlier run has written."""
        return 0 if self._report is None else self._report.bytes_kept

    def _rate(self) -> float:
        """Bytes a second, since bytes began to move."""
        seconds = time.monotonic() - self._moved_at
        return round(max(self._done - self._kept, 0) / seconds, 1) if seconds > 0 else 0.0

    def _export(self, *, running: bool, status: int = 0) -> None:
        if self._metrics is None:
            return
        try:
            self._write_metrics(running=running, status=status)
        except OSError as error:
            self._note(f"{shown(self._metrics)}: the metrics are no longer written: {error.strerror or error}")
            self._metrics = None

    def _write_metrics(self, *, running: bool, status: int = 0) -> None:
        assert self._metrics is not None
        values: Mapping[str, float] = {
            "start_time_seconds": self._began,
            "update_time_seconds": time.time(),
            "duration_seconds": time.monotonic() - self._begun,
            "running": float(running),
            "exit_status": float(status),
            "planned_bytes": float(self._total),
            "done_bytes": float(self._done),
            "bytes_per_second": self._rate(),
            "peak_resident_bytes": float(_peak()),
        }
        text = exposition(values, {**self._labels, "version": VERSION})
        new = f"{self._metrics}.{os.getpid()}.new"
        try:
            with open(new, "wb") as file:  # noqa: PTH123
                file.write(text.encode("utf-8", "backslashreplace"))
            os.replace(new, self._metrics)
        except OSError:
            if os.path.lexists(new):
                os.unlink(new)
            raise


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _refused(path, error) from None


def _refused(path: str, error: OSError) -> StorageError:
    why = error.strerror or error
    return StorageError(f"{shown(path)}: writing it failed: {why}; name a file in a directory that exists")


def _peak() -> int:
    """The highest resident set so far, in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


__all__: Sequence[str] = ("HEARTBEAT", "SCHEMA", "Observer")
