"""The process of one rank: ``python -m tpshard.numerics.worker DIRECTORY RANK SIZE``; started by :mod:`.processes`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path


def main(directory: str, rank: int, size: int) -> int:
    """Run a rank on the task in ``directory``; leaves ``result-RANK`` or ``error-RANK`` there."""
    from tpshard.errors import StorageError, TpshardError

    root = Path(directory)
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


def _leave(path: Path, value: object) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
