"""A tpshard.json from an enemy: refused in plain words, in bounded time and memory."""

from __future__ import annotations

import base64
import time
import tracemalloc
import zlib
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_manifest import DOCUMENT, PLACES, WHERE, Tensors, at, bare, document_of, manifest_of, sealed

from tpshard import sourcefiles
from tpshard.axes import replicated
from tpshard.errors import DamagedError, TpshardError
from tpshard.header import build_header
from tpshard.manifestreader import parsed


def bounded(raw: bytes, seconds: float = 3, nbytes: int = 64 << 20) -> None:
    """Refused, or read, within bounds."""
    begun = time.process_time()
    tracemalloc.start()
    try:
        parsed(raw, WHERE)
    except TpshardError as error:
        assert len(str(error)) < 3000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - begun < seconds
    assert peak < nbytes + 20 * len(raw)


def with_value(path: tuple[Any, ...], value: Any) -> bytes:
    document = deepcopy(DOCUMENT)
    at(document, path[:-1])[path[-1]] = value
    return sealed(document)


def test_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sourcefiles, "LARGEST_FRAME", 1 << 22)
    bomb = base64.b64encode(zlib.compress(b" " * (1 << 27), 9)).decode()
    for path in (("source", "files", 0, "frame", 0, "bytes"), ("source", "index", "bytes")):
        document = deepcopy(DOCUMENT)
        at(document, path[:-1])[path[-1]] = bomb
        if "frame" in path:
            document["source"]["files"][0]["size"] = 1 << 40
        with pytest.raises(DamagedError, match="unpacks to more than"):
            parsed(sealed(document), WHERE)
        bounded(sealed(document), nbytes=32 << 20)
    piece = base64.b64encode(zlib.compress(b" " * (1 << 21), 9)).decode()
    document = deepcopy(DOCUMENT)
    document["source"]["files"][0] |= {"size": 1 << 40, "frame": [{"at": n << 21, "bytes": piece} for n in range(200)]}
    with pytest.raises(DamagedError, match="unpacks to more than"):
        parsed(sealed(document), WHERE)
    bounded(sealed(document), nbytes=32 << 20)


def test_many_ranks_of_little() -> None:
    for tp_size in (10**9, 1 << 20, 10**30, -(10**9)):
        bounded(with_value(("tp_size",), tp_size))
    document = deepcopy(DOCUMENT)
    many = 20_000
    document["tp_size"] = many
    document["files"] = [{"name": f"{n}", "rank": n, "size": 0, "digests": ""} for n in range(many)]
    segments = ["whole*1"] * 20_000
    document["dims"] = [{"extent": 20_000, "ranks": [""] * many, "segments": segments}]
    bounded(bare(document))
    with pytest.raises(DamagedError, match="more segments than 20000 ranks of any model have"):
        parsed(bare(document), WHERE)


def test_many_kinds_on_many_ranks() -> None:
    tensors: Tensors = {f"t{n}": ("U8", (replicated(n),)) for n in range(1, 3000)}
    document = document_of(manifest_of(tensors, 1, ""))
    document["tp_size"] = many = 3000
    document["files"] = [{"name": f"{n}", "rank": n, "size": 0, "digests": ""} for n in range(many)]
    with pytest.raises(DamagedError, match="more kinds of tensors than 3000 ranks"):
        parsed(bare(document), WHERE)
    bounded(bare(document))


@pytest.mark.parametrize(
    "path", [("source", "label"), ("axes", "heads", "kind"), ("tensors", 0), ("new",), ("aliases",)]
)
def test_deep_nesting(path: tuple[Any, ...]) -> None:
    for depth in (200, 900, 5_000, 200_000):
        document = deepcopy(DOCUMENT)
        at(document, path[:-1])[path[-1]] = "DEEP"
        raw = bare(document).replace(b'"DEEP"', b"[" * depth + b"]" * depth)
        bounded(raw)
        with pytest.raises(DamagedError):
            parsed(raw, WHERE)


def test_long_texts_and_numbers() -> None:
    long = "9" * 1_000_000
    for path in PLACES[::3]:
        bounded(with_value(path, long[:100_000]))
    bounded(bare(DOCUMENT).replace(b'"tp_size": 3', b'"tp_size": ' + long.encode()))
    for axis in ("heads", "ffn", "vocab"):
        for field in DOCUMENT["axes"].get(axis, {}):
            bounded(with_value(("axes", axis, field), (1 << 48) - 1))
    digits = deepcopy(DOCUMENT)
    name = f"layers.{long[:5000]}.weight"
    header = build_header([(name, "U8", (1,))], None)
    digits["source"]["files"][0] |= {
        "size": len(header) + 1,
        "frame": [{"at": 0, "bytes": base64.b64encode(zlib.compress(header)).decode()}],
    }
    with pytest.raises(DamagedError, match="does not describe"):
        parsed(sealed(digits), WHERE)


# -- fuzz ----------------------------------------------------------------------------------------------------

RAW = bare(DOCUMENT)
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(["heads.kv[0:2]*2", "whole*4", "0:4", "pad:3", "#", "xxh3_128", "BF16", "model.safetensors"]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
fuzz = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def only_own_errors(raw: bytes) -> None:
    try:
        parsed(raw, WHERE)
    except TpshardError as error:
        assert error.exit_status in (3, 4)


@fuzz
@given(
    st.lists(
        st.tuples(st.sampled_from(PLACES), st.one_of(json_values, st.sampled_from(PLACES))), min_size=1, max_size=3
    ),
    st.booleans(),
)
def test_fuzzed_values(changes: list[tuple[tuple[Any, ...], Any]], seal: bool) -> None:
    document = deepcopy(DOCUMENT)
    for path, value in changes:
        try:  # a place among the values stands for what is there
            at(document, path[:-1])[path[-1]] = deepcopy(at(document, value)) if isinstance(value, tuple) else value
        except (KeyError, IndexError, TypeError, AttributeError):
            continue  # an earlier change took the place away
    try:
        raw = (sealed if seal else bare)(document)
    except (UnicodeEncodeError, ValueError, RecursionError):
        return  # half a surrogate cannot be written at all
    only_own_errors(raw)


@fuzz
@given(st.data())
def test_fuzzed_bytes(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "garbage"]))
    if kind == "garbage":
        only_own_errors(data.draw(st.binary(max_size=200)))
        return
    where = data.draw(st.integers(0, len(RAW) - 1))
    if kind == "cut":
        raw = RAW[:where]
    elif kind == "flip":
        raw = RAW[:where] + bytes([data.draw(st.integers(0, 255))]) + RAW[where + 1 :]
    else:
        raw = RAW[:where] + data.draw(st.binary(min_size=1, max_size=30)) + RAW[where:]
    if raw == RAW:
        return
    try:
        found = parsed(raw, WHERE)
    except TpshardError as error:
        assert error.exit_status in (3, 4)
        return
    assert found == parsed(RAW, WHERE), "a changed byte that is read must change nothing"


@fuzz
@given(st.binary(max_size=400), st.integers(0, 400))
def test_fuzzed_source_headers(noise: bytes, size: int) -> None:
    """The bytes that the manifest keeps of a source's header are parsed anew: garbage there is refused too."""
    document = deepcopy(DOCUMENT)
    document["source"]["files"][0] |= {
        "size": size,
        "format": "torch" if size % 2 else "safetensors",
        "frame": [{"at": 0, "bytes": base64.b64encode(zlib.compress(noise)).decode()}],
    }
    only_own_errors(sealed(document))
