"""Times parts of a split inside one process, for planning.py, which starts it once per figure.

    python in_process.py plan SRC TP                    seconds to open, lay out, place and plan
    python in_process.py move SRC OUT TP DIGEST         seconds to move the bytes; DIGEST: xxh3_128, sha256 or none

Prints one JSON object of seconds by phase.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tpshard.checkpoint import Checkpoint, open_checkpoint
from tpshard.execute import execute
from tpshard.layout import table_layout
from tpshard.place import Headed, place_native
from tpshard.planning import Plan, build_plan


def planned(source: str, tp_size: int) -> tuple[Checkpoint, Headed, Plan, dict[str, float]]:
    """A split of ``source`` up to its plan, and the seconds that each phase took."""
    times = [time.perf_counter()]
    checkpoint = open_checkpoint(source)
    times.append(time.perf_counter())
    layout = table_layout(checkpoint.matched, checkpoint.tensors, tp_size)
    times.append(time.perf_counter())
    headed = place_native(layout)
    times.append(time.perf_counter())
    plan = build_plan(checkpoint.placed, headed.placed)
    times.append(time.perf_counter())
    phases = ("open and match", "layout", "place and headers", "plan and proof")
    seconds = {phase: end - start for phase, start, end in zip(phases, times, times[1:], strict=False)}
    return checkpoint, headed, plan, seconds | {"tensors": len(checkpoint.tensors)}


def moved(source: str, out: Path, tp_size: int, algorithm: str | None) -> dict[str, float]:
    """Seconds that :func:`tpshard.execute.execute` takes for a split, files created and digests included."""
    checkpoint, headed, plan, _ = planned(source, tp_size)
    out.mkdir(parents=True)
    targets = [(out / file.name, file.size) for file in headed.placed.files]
    paths = [checkpoint.source.root / file.name for file in checkpoint.source.files]
    start = time.perf_counter()
    execute(plan.tasks, plan.reads, plan.writes, paths, targets, algorithm=algorithm)
    return {"move": time.perf_counter() - start, "cpu": time.process_time()}


def main() -> None:
    """Command line entry."""
    if sys.argv[1] == "plan":
        seconds = planned(sys.argv[2], int(sys.argv[3]))[3]
    else:
        source, out, tp_size, digest = sys.argv[2:]
        seconds = moved(source, Path(out), int(tp_size), None if digest == "none" else digest)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
