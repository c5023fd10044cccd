"""transformers' own tensor parallelism on the tiny checkpoints: which give the logits of one process.

Imported by coverage.py. The ranks are processes that go through all architectures together on gloo; where one
fails or hangs, they are ended and new ones go on behind it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zoo

LIMIT = 60.0  # seconds for one architecture
TOLERANCE = 1e-3  # relative, in float32
VARIANT = "gqa4"  # 4 KV heads, so that the heads divide at TP 2 and 4
IN_STEP = ("equal", "no plan", "not run")


def measured(
    architectures: Sequence[str], tp_size: int, progress: Callable[[str], None], task: str = "causal"
) -> dict[str, str]:
    """For every architecture ``"equal"``, or what else came of it in a few words."""
    found: dict[str, str] = {}
    waiting = list(architectures)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        while waiting:
            queue: Any = context.Queue()
            port = _free_port()
            common = (tp_size, port, waiting, task, Path(directory), queue)
            ranks = [context.Process(target=_rank, args=(rank, *common), daemon=True) for rank in range(tp_size)]
            for process in ranks:
                process.start()
            while waiting:
                name = waiting[0]
                try:
                    name, result = queue.get(timeout=LIMIT + 60 * (not found))
                except Exception:  # nothing came: the ranks wait for each other, or died without a word
                    result = "hangs or dies"
                found[name] = result
                waiting.pop(0)
                progress(f"transformers TP {tp_size}: {name}: {result}")
                if result not in IN_STEP and not result.startswith("other logits"):
                    break  # ranks that failed are not in step any more
            for process in ranks:
                process.kill()
                process.join()
    return found


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _rank(rank: int, tp_size: int, port: int, names: list[str], task: str, directory: Path, queue: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tp_size), "LOCAL_WORLD_SIZE": str(tp_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what gloo says when another rank is ended
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=tp_size)
    for name in names:
        try:
            result = _compared(name, task, directory / f"{name}-{tp_size}", rank, tp_size)
        except Exception as error:  # whatever it makes of this model
            result = f"fails: {type(error).__name__}: {' '.join(str(error).split()):.120}"
        told: list[Any] = [None] * tp_size
        torch.distributed.all_gather_object(told, result)
        worst = next((r for r in told if r not in IN_STEP), result)
        if rank == 0:
            queue.put((name, worst))


def _compared(name: str, task: str, directory: Path, rank: int, tp_size: int) -> str:
    import torch
    from transformers.distributed import DistributedConfig

    if rank == 0:
        zoo.write(name, directory, task, VARIANT)
    torch.distributed.barrier()
    cls = zoo.class_of(name, task)
    generator = torch.Generator().manual_seed(0)
    plain = cls.from_pretrained(str(directory), dtype=torch.float32, attn_implementation="eager").eval()
    text = plain.config.get_text_config()
    inputs = {"input_ids": torch.randint(5, int(text.vocab_size) - 24, (2, 16), generator=generator)}
    if not plain.supports_tp_plan:
        return "no plan"
    try:
        with torch.no_grad():
            expected = plain(**inputs).logits
    except Exception:  # a class that wants more than token ids
        return "not run"
    cut = cls.from_pretrained(
        str(directory), dtype=torch.float32, attn_implementation="eager",
        distributed_config=DistributedConfig(tp_size=tp_size, tp_plan="auto"),
    ).eval()  # fmt: skip
    with torch.no_grad():
        got = cut(**inputs).logits
    got = got.full_tensor() if hasattr(got, "full_tensor") else got
    if got.shape != expected.shape:
        return f"other logits: shape {list(got.shape)} for {list(expected.shape)}"
    gap = float((got - expected).norm() / expected.norm())
    return "equal" if gap < TOLERANCE else f"other logits: off by {gap:.2g}"


def main() -> None:
    """Print what came of the architectures named as arguments, as JSON."""
    import sys

    print(json.dumps(measured(sys.argv[2:], int(sys.argv[1]), lambda line: print(line, file=sys.stderr)), indent=1))


if __name__ == "__main__":
    main()
