"""tpshard.json: written and read back, refused when touched, and harmless whatever it holds."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import kinds
import planned
import pytest

from tpshard import manifest as manifests
from tpshard import registry
from tpshard.axes import Dim, Heads, Padded, Units, replicated
from tpshard.errors import DamagedError, LayoutError, TpshardError, UnsupportedError
from tpshard.header import build_header
from tpshard.manifest import Manifest, Note, Origin, RankFile, SideFile, dumped
from tpshard.manifestreader import parsed
from tpshard.place import place_native
from tpshard.planning import stored_bytes
from tpshard.sourcefiles import SourceFile

WHERE = "shards/tpshard.json"
Tensors = dict[str, tuple[str, tuple[Dim, ...]]]
Document = dict[str, Any]


def digest(*parts: object) -> str:
    return f"{zlib.crc32(repr(parts).encode()):032x}"


def manifest_of(tensors: Tensors, tp_size: int, algorithm: str = "xxh3_128", files: int = 1) -> Manifest:
    layout = planned.native(tensors, tp_size)
    times = 2 if algorithm == "sha256" else 1
    logicals = tuple(layout.tensors.values())
    sources = []
    for number in range(files):
        header = build_header([tuple(t) for t in logicals[number::files]], {"format": "pt"} if number % 2 else None)
        size = len(header) + sum(stored_bytes(t.shape, t.dtype) for t in logicals[number::files])
        sources.append(
            SourceFile(f"part-{number}.safetensors", size, "safetensors", ((0, header),), rebuilt=number == 1)
        )
    in_order = tuple(t for number in range(files) for t in logicals[number::files])
    placed = place_native(planned.native({t.name: tensors[t.name] for t in in_order}, tp_size)).placed
    held: list[list[str]] = [[] for _ in placed.files]
    for row in placed.extents:
        for extent in row:
            if extent is not None:
                held[extent.file].append(digest(extent.tensor, extent.file) * times)
    return Manifest(
        tp_size,
        in_order,
        {t.name: tensors[t.name][1] for t in in_order},
        {t.name: Note(f"role{len(t.shape)}", "added once" if len(t.shape) == 1 else "") for t in in_order},
        {"lm_head.weight": in_order[0].name},
        Origin(
            "org/model",
            "llama",
            "c" * 64,
            tuple(sources),
            ("model.safetensors.index.json", b'{"weight_map": {}}\n') if files > 1 else None,
            tuple(digest(t.name) * times for t in in_order) if algorithm else (),
            ("model.gguf (weights that are not in use)", "s\u00f6 (its name is not UTF-8)"),
        ),
        (SideFile("config.json", 321, "d" * 64), SideFile("custom/köde.py", 0, "e" * 64)),
        tuple(
            RankFile(file.name, file.rank, file.size, tuple(digests) if algorithm else ())
            for file, digests in zip(placed.files, held, strict=True)
        ),
        algorithm,
        0,
    )


heads, ffn, vocab = Heads("heads", 6, 2), Units("ffn", 10), Padded("vocab", 9)
SMALL: Tensors = {
    "embed.weight": ("BF16", (vocab.each(), replicated(4))),
    **{
        f"layers.{layer}.{name}": entry
        for layer in range(3)
        for name, entry in {
            "qkv.weight": ("BF16", (heads.query(2) + heads.kv(2) * 2, replicated(4))),
            "qkv.bias": ("F32", (heads.grouped(2, 2, 2),)),
            "down.weight": ("BF16", (replicated(4), ffn.each(layer + 1))),  # one pattern, three shapes
            "norm.weight": ("F32" if layer else "BF16", (replicated(4),)),  # one pattern, two dtypes
        }.items()
    },
    "scale": ("F64", ()),
    "none": ("U8", (replicated(0), replicated(3))),
}


def small(tp_size: int = 3) -> Manifest:
    return manifest_of(SMALL, tp_size)


def document_of(manifest: Manifest) -> Document:
    document: Document = json.loads(dumped(manifest))
    return document


def bare(document: Document) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def sealed(document: Document) -> bytes:
    """As if tpshard itself had written this: what is then refused is refused for what it says."""
    return bare({**document, "checksum": manifests.checksum(document)})


# -- there and back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", range(1, 13))
def test_every_layout_there_and_back(tp_size: int) -> None:
    for files, algorithm in ((1, "xxh3_128"), (3, "sha256"), (2, "")):
        manifest = manifest_of(kinds.BYTES, tp_size, algorithm, files)
        raw = dumped(manifest)
        back = parsed(raw, WHERE)
        assert back == manifest
        assert back.layout.digest == manifest.layout.digest
        assert back.content == manifest.content
        assert dumped(back) == raw, "the same bytes on every run"


def test_sub_byte_dtypes_there_and_back() -> None:
    manifest = manifest_of({"packed": kinds.CUT["packed"]}, 4)
    assert parsed(dumped(manifest), WHERE) == manifest


def test_the_text_is_for_people_too() -> None:
    raw = dumped(small())
    document = json.loads(raw)
    assert list(document) == sorted(document)
    assert raw.decode().count("\n") < 60
    entry = next(e for e in document["tensors"] if e["pattern"] == "layers.#.qkv.weight")
    assert entry == {
        "pattern": "layers.#.qkv.weight",
        "count": 3,
        "dtype": "BF16",
        "shape": [20, 4],
        "cut": [1, None],
        "role": "role2",
        "note": "",
    }
    assert document["dims"][1]["segments"] == ["heads.query[0:6]*2", "heads.kv[0:2]*2", "heads.kv[0:2]*2"]
    assert document["dims"][1]["ranks"] == ["0:4 12:14 16:18", "4:6 12:14 16:18", "6:12 14:16 18:20"]
    assert document["axes"]["heads"]["ranks"] == {"query": ["0:2", "2:3", "3:6"], "kv": ["0:1", "0:1", "1:2"]}
    assert [e["count"] for e in document["tensors"] if e["pattern"] == "layers.#.down.weight"] == [1, 1, 1]


def test_formatting_is_free() -> None:
    document = document_of(small())
    assert parsed(json.dumps(document, indent=3).encode(), WHERE) == small()
    assert parsed(bare(dict(reversed(document.items()))), WHERE) == small()


def test_the_reader_needs_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = dumped(small())

    def explode(*_: object) -> None:
        raise AssertionError("the tables were asked for")

    for name in ("families", "_by_model_type", "family_of", "table_for"):
        monkeypatch.setattr(registry, name, explode)
    manifest = parsed(raw, WHERE)
    for tp_size in (1, 2, 6):
        planned.native({t.name: (t.dtype, manifest.dims[t.name]) for t in manifest.tensors}, tp_size)
    script = (
        "import sys, tpshard.manifest; print([m for m in sys.modules if 'converters' in m or m in ('torch', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_two_axes_of_one_name_cannot_be_told_apart() -> None:
    tensors: Tensors = {"a": ("U8", (Units("x", 4).each(),)), "b": ("U8", (Units("x", 5).each(),))}
    with pytest.raises(LayoutError, match="two axes have one name"):
        dumped(manifest_of(tensors, 2))


# -- what is refused -----------------------------------------------------------------------------------------


def test_newer_versions() -> None:
    document = {**document_of(small()), "version": 2}
    for raw in (bare(document), sealed(document), b'{"format": "tpshard", "version": 7, "everything": "else"}'):
        with pytest.raises(
            UnsupportedError, match=r"format version .* reads up to 1; install a newer tpshard"
        ) as caught:
            parsed(raw, WHERE)
        assert caught.value.exit_status == 3
        assert str(caught.value).startswith(WHERE)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a document."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from leaves(inner, (*path, at))


def at(document: Document, path: tuple[Any, ...]) -> Any:
    found: Any = document
    for key in path:
        found = found[key]
    return found


def changed(document: Document, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Document:
    copy = deepcopy(document)
    change(at(copy, path[:-1]), path[-1])
    return copy


def edit(holder: Any, key: Any) -> None:
    value = holder[key]
    if isinstance(value, bool) or value is None:
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = value + 1
    elif isinstance(value, str):
        holder[key] = value[:-1] + ("0" if value[-1:] != "0" else "1")
    elif isinstance(value, list):
        value.append(value[-1] if value else 0)
    else:
        value["more"] = 1


def remove(holder: Any, key: Any) -> None:
    del holder[key]


DOCUMENT = document_of(manifest_of(dict(list(SMALL.items())[:5]), 3, files=2))
PLACES = list(leaves(DOCUMENT))
FULL = document_of(small())


@pytest.mark.parametrize("change", [edit, remove])
def test_every_field_that_is_touched_is_noticed(change: Callable[[Any, Any], None]) -> None:
    assert len(PLACES) > 100
    parsed(bare(DOCUMENT), WHERE)
    for path in PLACES:
        with pytest.raises((DamagedError, UnsupportedError)) as caught:
            parsed(bare(changed(DOCUMENT, path, change)), WHERE)
        message = str(caught.value)
        assert message.startswith(WHERE), path
        assert "copy the directory again" in message or path == ("version",), path
        assert len(message) < 700


def test_values_of_other_types_are_refused() -> None:
    for path in PLACES:
        for value in (None, True, -1, 1.5, "text", [], {}, [[]], 10**30):
            if value == at(DOCUMENT, path) and type(value) is type(at(DOCUMENT, path)):
                continue

            def put(holder: Any, key: Any, value: Any = value) -> None:
                holder[key] = value

            with pytest.raises(TpshardError):
                parsed(bare(changed(DOCUMENT, path, put)), WHERE)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "safetensors", "is not a manifest of tpshard"),
        (("tp_size",), 0, "tp_size is 0, not a whole number from 1"),
        (("tp_size",), 4, "lists no file for rank 3 of 4"),
        (("tp_size",), 10**9, "tp_size is 1000000000"),
        (("tp_size",), 2, "rank is 2, not a whole number from 0 to 1"),
        (("layout",), "0" * 64, "layout does not belong to the cuts"),
        (("content",), "0" * 64, "content does not belong to the tensors"),
        (("algorithm",), "md5", "'md5', a digest that this tpshard does not know"),
        (("algorithm",), "", "digests is not a row of digests by no algorithm"),
        (("source", "digests"), [], "digests is a list, not text"),
        (("source", "digests"), "", "has 0 digests for 5 tensors"),
        (("source", "digests"), "0" * 33, "is not a row of digests"),
        (("source", "digests"), "X" * 160, "is not a row of digests"),
        (("axes", "heads", "query_heads"), 8, "lists runs that do not follow|no axis has"),
        (("axes", "heads", "query_heads"), 7, "7 query heads cannot be grouped over 2 kv heads"),
        (("axes", "heads", "kv_heads"), 0, "kv_heads is 0, not a positive whole number"),
        (("axes", "heads", "kind"), "spiral", "unknown kind 'spiral'"),
        (("axes", "vocab"), [], "axes.vocab is a list, not an object"),
        (("dims", 0, "ranks"), ["0:12"], "lists the runs of 1 ranks where there are 3"),
        (("dims", 0, "ranks", 0), "0:7", "lists runs that do not follow from its segments"),
        (("dims", 0, "segments", 0), "vocab.unit[0:10]*1", "refers to units that no axis has"),
        (("dims", 0, "segments", 0), "vocab.unit[0:9]*9999999999999999999", "is not a segment"),
        (("tensors", 0, "shape"), [9, 5], "gives another dtype or shape than the header of embed.weight"),
        (("tensors", 0, "dtype"), "F16", "gives another dtype or shape"),
        (("tensors", 0, "cut"), [None], "does not fit the shape"),
        (("tensors", 0, "cut"), [99, None], "cut.* is 99, not a whole number from 0 to"),
        (("tensors", 0, "pattern"), "embed.bias", "does not describe embed.weight"),
        (("tensors", 0, "count"), 2, "count is 2 where 1 tensors are described"),
        (("tensors", 0, "count"), 0, "count is 0, not a whole number from 1"),
        (("axes", "heads", "ranks"), {}, "heads.ranks gives units that do not follow from the axis"),
        (("axes", "vocab", "ranks", "unit", 1), "3:7", "vocab.ranks gives units that do not follow from the axis"),
        (("source", "left_out"), "nothing", "left_out is not a list of texts"),
        (("files", 1, "name"), "../outside", "not a plain path inside the directory"),
        (("source", "files", 0, "format"), "pickle", "unknown format 'pickle'"),
        (("source", "files", 0, "size"), 1 << 40, "the file has"),
        (("source", "files", 0, "frame", 0, "bytes"), "!!!", "does not unpack"),
        (("source", "files", 0, "frame", 0, "at"), 1, "frame does not hold"),
    ],
)
def test_contradictions_are_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    document = deepcopy(DOCUMENT)
    at(document, path[:-1])[path[-1]] = value
    with pytest.raises(DamagedError, match=message) as caught:
        parsed(sealed(document), WHERE)
    assert caught.value.exit_status == 4


def test_what_follows_from_the_rest_is_worked_out_again() -> None:
    """Counts, patterns and units are there to be read by themselves: they may not lie, whatever the checksum."""
    derived = [
        path
        for path in leaves(FULL)
        if (path[0] == "axes" and "ranks" in path)
        or (path[0] == "dims" and path[-1] == "extent")
        or (path[0] == "tensors" and {"count", "names", "pattern", "dtype", "shape"}.intersection(path))
    ]
    assert len(derived) > 50
    for path in derived:
        for change in (edit, remove):
            if change is remove and path[-1] == "names":
                continue  # the one entry of a pattern without names stands for all that no other names
            with pytest.raises(DamagedError):
                parsed(sealed(changed(FULL, path, change)), WHERE)


def test_an_entry_that_describes_nothing_or_the_same_again() -> None:
    for more, message in (
        ({}, "again"),
        ({"pattern": "none.of.them"}, "count is"),
        ({"names": ["a"]}, "count is"),
    ):
        document = deepcopy(DOCUMENT)
        document["tensors"].append({**document["tensors"][0], **more})
        with pytest.raises(DamagedError, match=message):
            parsed(sealed(document), WHERE)


def test_a_tensor_in_two_files() -> None:
    document = deepcopy(DOCUMENT)
    document["source"]["files"].append({**document["source"]["files"][0], "name": "again"})
    with pytest.raises(DamagedError, match="names a tensor twice"):
        parsed(sealed(document), WHERE)


BAD_NAMES = ["", "/etc/passwd", "..", "a/../../b", "a//b", "./a", "a/.", "a\\..\\b", "a\0b", "a/"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_leave_the_directory(name: str) -> None:
    for path in (
        ("files", 0, "name"),
        ("side_files", 0, "path"),
        ("source", "files", 0, "name"),
        ("source", "index", "name"),
    ):
        document = deepcopy(DOCUMENT)
        at(document, path[:-1])[path[-1]] = name
        with pytest.raises(DamagedError, match="not a plain path inside the directory"):
            parsed(sealed(document), WHERE)
