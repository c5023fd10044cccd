"""Hostile pickles: nothing is executed, nothing hangs, nothing grows; one plain error each."""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchsaves import framed, outcome, parse

from tpshard.errors import DamagedError, UnsupportedError

torch = pytest.importorskip("torch")


class Reduced:
    """An object whose pickle calls ``function(*arguments)`` when it is loaded."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], tuple(self.call[1:])


def test_the_trap_works_with_the_standard_reader(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps({"w": Reduced(os.mkdir, str(marker))}, 2))  # else the tests below would prove nothing
    assert marker.exists()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_executed(tmp_path: Path, protocol: int, legacy: bool) -> None:
    marker = tmp_path / "marker"
    calls = [
        Reduced(os.mkdir, str(marker)),
        Reduced(os.system, f"mkdir {marker}"),
        Reduced(eval, f"__import__('os').mkdir({str(marker)!r})"),
        Reduced(exec, f"import os; os.mkdir({str(marker)!r})"),
        Reduced(torch.load, str(marker)),
        Reduced(torch.hub.load, "a", "b"),
        Reduced(collections.OrderedDict.fromkeys, "ab"),
    ]
    for call in calls:
        for state in ({"w": call}, call, {"w": [{"v": (call,)}]}):
            with pytest.raises((UnsupportedError, DamagedError)) as caught:
                parse(framed(pickle.dumps(state, protocol), legacy=legacy))
            if protocol >= 2:
                assert "nothing of it was executed" in str(caught.value)
    assert not marker.exists()


P = b"\x80\x02"
TORCH = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
BOMBS = {
    "deep tuples": P + b")" + b"\x85" * 1_000_000 + b".",
    "deep lists": P + b"]" * 50_000 + b"a" * 49_999 + b".",
    "deep tuple as a key": P + b"})" + b"q\x01h\x01\x86" * 200_000 + b"Ns.",
    "doubling tuple as a key": P + b"}K\x01" + b"".join(b"q\x00h\x00\x86" for _ in range(200)) + b"K\x01s.",
    "memo index of 2**32": P + b"}r\xff\xff\xff\xff0.",
    "memo that is not there": P + b"h\x07.",
    "text of 4 GiB": P + b"X\xff\xff\xff\xffabc.",
    "text of 2**63 bytes": P + b"\x8d" + b"\xff" * 7 + b"\x7f" + b"abc.",
    "bytes of 2**63": P + b"\x8e" + b"\xff" * 7 + b"\x7f" + b"abc.",
    "bytearray of 2**63": P + b"\x96" + b"\xff" * 7 + b"\x7f" + b"abc.",
    "frame of 2**64": P + b"\x95" + b"\xff" * 8 + b"}K\x01.",
    "integer of 2 GiB": P + b"\x8b\xff\xff\xff\x7fabc.",
    "decimal integer": P + b"I" + b"9" * 100_000 + b"\n.",
    "stack of marks": P + b"(" * 3_000_000 + b".",
    "endless pushes": P + b"K\x01" * 2_000_000 + b".",
    "endless memo": P + b"]" + b"\x94" * 6_000_000 + b".",
    "no stop": P + b"}" * 10,
    "empty": b"",
    "stop alone": P + b".",
    "mark as the value": P + b"(.",
    "reduce of nothing": P + b"R.",
    "reduce of a text": P + b"X\x01\x00\x00\x00a)R.",
    "build on a tensor": P + TORCH + b"(" + STORAGE + b"K\x00K\x06\x85K\x01\x85\x89NtR}b.",
    "build on a function": P + TORCH + b"}X\x08\x00\x00\x00__code__Nsb.",
    "call of a storage type": P + b"ctorch\nFloatStorage\n)R.",
    "dict from pairs with a list as key": P + b"ccollections\nOrderedDict\n(](]Nttt\x85R.",
    "too few arguments": P + TORCH + b")R.",
    "negative shape": P + TORCH + b"(" + STORAGE + b"K\x00J\xff\xff\xff\xff\x85K\x01\x85\x89NtR.",
    "shape of 2**200": P
    + b"}X\x01\x00\x00\x00a"
    + TORCH
    + b"("
    + STORAGE
    + b"K\x00\x8a\x1a"
    + b"\x01" * 26
    + b"\x85K\x01\x85\x89NtRs.",
    "offset beyond the storage": P
    + b"}X\x01\x00\x00\x00a"
    + TORCH
    + b"("
    + STORAGE
    + b"K\x05K\x06\x85K\x01\x85\x89NtRs.",
    "newobj": P + b"ccollections\nOrderedDict\n)\x81.",
    "inst": P + b"(ios\nsystem\n.",
    "obj": P + b"(cos\nsystem\no.",
    "extension registry": P + b"\x82\x01.",
    "persistent id as text": P + b"P0\n.",
    "next buffer": b"\x80\x05\x97.",
    "stack global of numbers": b"\x80\x04K\x01K\x02\x93.",
    "dotted global": b"\x80\x04\x8c\x0btorch._utils\x8c\x1e_rebuild_tensor_v2.__globals__\x93.",
    "name without end": P + b"c" + b"a" * 10_000,
    "protocol 9": b"\x80\x09}.",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("case", BOMBS)
def test_hostile_pickles_end_in_one_plain_error(case: str, legacy: bool) -> None:
    if legacy and len(BOMBS[case]) > 2_000_000:
        pytest.skip("the same machine reads both formats; large pickles are tried once")
    with pytest.raises((UnsupportedError, DamagedError)) as caught:
        parse(framed(BOMBS[case], legacy=legacy))
    assert len(str(caught.value)) < 2000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*BOMBS.values()]).filter(lambda bomb: len(bomb) < 200), max_size=3),
    st.binary(max_size=60),
)
def test_mixtures_of_opcodes_are_refused(parts: list[bytes], tail: bytes) -> None:
    outcome(framed(P + b"".join(part[2:-1] for part in parts) + tail + b".", legacy=False))
