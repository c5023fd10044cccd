"""The processes of the ranks, started by :mod:`.processes`.

``python -m tpshard.numerics.worker DIRECTORY SIZE`` imports what a rank needs once and forks ``SIZE`` ranks, whose
exit status it leaves in ``code-RANK``; with a third argument, a rank, it is that rank's process itself.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import time
from pathlib import Path

POLL = 0.02


def main(directory: str, size: int, rank: int | None = None) -> int:
    """Run one rank on the task in ``directory``, or fork all of them; returns the exit status."""
    root = Path(directory)
    return _forked(root, size) if rank is None else _ranked(root, size, rank)


def _ranked(root: Path, size: int, rank: int) -> int:
    """Run a rank; leaves ``result-RANK`` or ``error-RANK``."""
    from tpshard.errors import StorageError, TpshardError

    try:
        import torch.distributed as dist

        from .processes import place_of
        from .runtime import run_rank

        task = pickle.loads((root / "task").read_bytes())  # written by the process that started this one
        place = place_of(rank, size, rank, size, task["device"])
        store = dist.FileStore(str(root / "store"), -1)
        result = run_rank(place, store, task)
    except TpshardError as error:
        _leave(root / f"error-{rank}", error.with_traceback(None))
        return error.exit_status
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        _leave(root / f"error-{rank}", StorageError(f"rank {rank} failed: {text:.600}"))
        return StorageError.exit_status
    _leave(root / f"result-{rank}", result)
    return 0


def _forked(root: Path, size: int) -> int:
    parent = os.getppid()
    _import(root)
    gc.freeze()  # a collection would write into, and so copy, every page of what was imported
    ranks = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                log = os.open(root / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(log, 1)
                os.dup2(log, 2)
                status = _ranked(root, size, rank)
            finally:
                _end(status)
        ranks[pid] = rank
    while ranks:
        pid, found = os.waitpid(-1, os.WNOHANG)
        if pid:
            _leave(root / f"code-{ranks.pop(pid)}", os.waitstatus_to_exitcode(found))
            continue
        if os.getppid() != parent:  # whoever asked for this is gone, and with it the directory's owner
            os.killpg(0, signal.SIGKILL)
        time.sleep(POLL)
    return 0


def _end(status: int) -> None:
    """End at once: torch's threads may abort a process whose interpreter is being taken down under them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _import(root: Path) -> None:
    """Import torch, transformers and the model's class; nothing here may start threads or touch a GPU."""
    from tpshard.errors import TpshardError

    from . import runtime  # noqa: F401
    from .skeleton import model_class, read_config

    task = pickle.loads((root / "task").read_bytes())
    try:
        source = Path(task["source"])
        model_class(read_config(source, task["trust"]), source, task["trust"])
    except TpshardError:
        return  # a rank says it


def _leave(path: Path, value: object) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


if __name__ == "__main__":
    _end(main(sys.argv[1], *(int(word) for word in sys.argv[2:])))
