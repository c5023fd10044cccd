"""Plans as data: equal, hashable, printable, and the same on every run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import planned
from kinds import BYTES

from tpshard.axes import Dim
from tpshard.place import place_native
from tpshard.planning import Plan, build_plan


def test_plans_are_equal_hashable_and_printable() -> None:
    def plan(a: int, b: int, tensors: Mapping[str, tuple[str, tuple[Dim, ...]]] = BYTES) -> Plan:
        return build_plan(*(place_native(planned.native(tensors, tp_size)).placed for tp_size in (a, b)))

    first, second = plan(4, 3), plan(4, 3)
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)
    assert first != plan(3, 4)
    assert first != plan(4, 3, {n: e for n, e in BYTES.items() if n != "bias"})
    assert first != "a plan"
    assert len({first, second, plan(3, 4)}) == 2
    text = list(first.text())
    assert text == list(second.text())
    assert all(line.isprintable() for line in text)
    for extent in (*first.reads, *first.writes):
        assert any(extent.tensor in line and str(extent.offset) in line for line in text)
    assert not any(" at 0x" in line for line in text), "no address of an object"


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import hashlib, kinds, planned
from tpshard.place import place_native
from tpshard.planning import build_plan
here, there = (place_native(planned.native(kinds.CUT, n)) for n in (4, 3))
plan = build_plan(here.placed, there.placed)
print(plan.digest, here.placed.layout.digest, hashlib.sha256(b"".join(there.headers)).hexdigest())
"""


def test_plans_are_the_same_on_every_run() -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    seen = set()
    for seed in ("0", "1", "31337"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
        )
        seen.add(done.stdout)
    assert len(seen) == 1
    assert len(seen.pop().split()) == 3
