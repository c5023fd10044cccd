"""``tpshard.json``: what a directory of shards holds, where it came from, and how to undo the cut.

It is written last: its presence is the commit. A reader needs no converter: dimensions are given as
segments of axes, so any other degree can be worked out from the manifest alone, and as the runs of
every rank, so that no algebra is needed to read the files. Format version 1; a newer one is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from . import sourcefiles
from .collection import uncollected
from .degrees import axes_of
from .digest import ALGORITHMS
from .dimtext import axis_fields, dim_texts, parse_axis, parse_dim, runs_text
from .errors import DamagedError, LayoutError, UnsupportedError
from .fields import Fields
from .layout import Layout, cut_layout
from .matching import Logical
from .partition import Axis, Dim, partition, replicated
from .sourcefiles import SourceFile, packed, parse_source_files, plain_name, reread, unpacked
from .strictjson import parse_object
from .table import template_of

NAME = "tpshard.json"
FORMAT = "tpshard"
VERSION = 1
LARGEST = 1 << 30  # bytes of a manifest; 10,000 tensors on 64 ranks take about 30 MB
LARGEST_CUTS = 1 << 22  # segments of all dimensions on all ranks; 200 kinds of tensors on 64 ranks have some 50,000
_CutNumbers = tuple[int | None, ...]  # by dimension: its number in the manifest's list, None where it is kept whole

_CHECKSUM = "checksum"
_AGAIN = "copy the directory again, or split again"


@dataclass(frozen=True)
class Note:
    """What is to be known about a tensor besides its cut: its role in the model, and how ranks treat it."""

    role: str
    text: str = ""


@dataclass(frozen=True)
class SideFile:
    """A file carried along byte for byte."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class RankFile:
    """A file of a rank, with the digest of every tensor in it, in stored order."""

    name: str
    rank: int
    size: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Origin:
    """The checkpoint that was cut."""

    label: str
    family: str
    config_sha256: str
    files: tuple[SourceFile, ...]
    index: tuple[str, bytes] | None
    digests: tuple[str, ...]  # of every logical tensor, in source order

    def content(self, tensors: Sequence[Logical]) -> str:
        """sha256 over names, dtypes, shapes and digests of all tensors: the identity of the weights."""
        state = hashlib.sha256()
        digests = self.digests or ("",) * len(tensors)
        for tensor, digest in zip(tensors, digests, strict=True):
            line = f"{tensor.name}\0{tensor.dtype}\0{list(tensor.shape)}\0{digest}\n"
            state.update(line.encode("utf-8", "surrogatepass"))
        return state.hexdigest()


@dataclass(frozen=True)
class Manifest:
    """Everything that ``tpshard.json`` says.

    ``algorithm`` names the digest of the tensors, "" where none was taken; ``max_file_bytes`` is the
    size limit under which the ranks' files were numbered, 0 for none.
    """

    tp_size: int
    tensors: tuple[Logical, ...]
    dims: Mapping[str, tuple[Dim, ...]]
    notes: Mapping[str, Note]
    aliases: Mapping[str, str]
    origin: Origin
    side_files: tuple[SideFile, ...]
    files: tuple[RankFile, ...]
    algorithm: str
    max_file_bytes: int

    @cached_property
    def layout(self) -> Layout:
        """The layout of the files."""
        return cut_layout(self.tensors, self.dims, self.tp_size)

    @cached_property
    def content(self) -> str:
        """The identity of the weights, whatever their layout."""
        return self.origin.content(self.tensors)


@uncollected()
def dumped(manifest: Manifest) -> bytes:
    """The manifest as sorted UTF-8 JSON, one entry of the long lists a line."""
    axes = list(axes_of(manifest.dims))
    if len({axis.name for axis in axes}) != len(axes):
        raise LayoutError(f"two axes have one name: {', '.join(sorted(axis.name for axis in axes))}")
    numbered: dict[Dim, int] = {}
    cuts: dict[int, _CutNumbers] = {}  # by identity of the dimensions: all tensors of one rule share one tuple of them
    for tensor in manifest.tensors:
        dims = manifest.dims[tensor.name]
        if id(dims) not in cuts:
            cuts[id(dims)] = tuple([numbered.setdefault(dim, len(numbered)) if dim.axes else None for dim in dims])
    origin = manifest.origin
    if sum(len(data) for file in origin.files for _, data in file.frame) > sourcefiles.LARGEST_FRAME:
        raise UnsupportedError(
            f"the headers of the source have more than {sourcefiles.LARGEST_FRAME} bytes, too many to keep"
        )
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "tp_size": manifest.tp_size,
        "family": origin.family,
        "config_sha256": origin.config_sha256,
        "content": manifest.content,
        "layout": manifest.layout.digest,
        "algorithm": manifest.algorithm,
        "max_file_bytes": manifest.max_file_bytes,
        "axes": {axis.name: _axis_json(axis, manifest.tp_size) for axis in axes},
        "dims": [
            {
                "extent": dim.extent,
                "ranks": [runs_text(runs) for runs in partition(dim, manifest.tp_size).ranks],
                "segments": dim_texts(dim),
            }
            for dim in numbered
        ],
        "tensors": _tensor_groups(manifest, cuts),
        "aliases": dict(manifest.aliases),
        "source": {
            "label": origin.label,
            "digests": list(origin.digests),
            "index": None if origin.index is None else {"name": origin.index[0], "bytes": packed(origin.index[1])},
            "files": [
                {
                    "name": file.name,
                    "size": file.size,
                    "format": file.format,
                    "rebuilt": file.rebuilt,
                    "frame": [{"at": at, "bytes": packed(data)} for at, data in file.frame],
                }
                for file in origin.files
            ],
        },
        "side_files": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in manifest.side_files],
        "files": [{"name": f.name, "rank": f.rank, "size": f.size, "digests": list(f.digests)} for f in manifest.files],
    }
    document[_CHECKSUM] = _checksum(document)
    return _lines(document).encode("utf-8")


def _checksum(document: Mapping[str, Any]) -> str:
    """sha256 over the canonical text of everything but the checksum itself, hex: finds what no other field covers."""
    rest = {key: value for key, value in document.items() if key != _CHECKSUM}
    return hashlib.sha256(_lines(rest).encode("utf-8")).hexdigest()


def _axis_json(axis: Axis, tp_size: int) -> dict[str, object]:
    units = {view: [f"{start}:{stop}" for start, stop in axis.bounds(view, tp_size)] for view in axis.views()}
    return {**axis_fields(axis), "ranks": units}


class _Kind(NamedTuple):
    """What tensors that share an entry of the manifest have in common."""

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    cut: _CutNumbers
    role: str
    note: str


def _tensor_groups(manifest: Manifest, cuts: Mapping[int, _CutNumbers]) -> list[dict[str, Any]]:
    """Tensors by name pattern; names are listed only where one pattern has tensors of several kinds."""
    groups: dict[_Kind, list[str]] = {}
    for tensor in manifest.tensors:
        name, dtype, shape = tensor
        note = manifest.notes[name]
        kind = _Kind(template_of(name)[0], dtype, shape, cuts[id(manifest.dims[name])], note.role, note.text)
        groups.setdefault(kind, []).append(name)
    kinds = Counter(kind.pattern for kind in groups)
    return [
        {**kind._asdict(), "count": len(names)} | ({"names": names} if kinds[kind.pattern] > 1 else {})
        for kind, names in groups.items()
    ]


def _lines(document: Mapping[str, Any]) -> str:
    """Sorted JSON with a line for each top-level member and each entry of a list of objects."""

    def short(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(", ", ": "))

    parts = []
    for key in sorted(document):
        value = document[key]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(map(short, value)) + "\n ]"
        else:
            text = short(value)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@uncollected()
def parsed(raw: bytes, where: str) -> Manifest:
    """Read a manifest back and check that it agrees with itself.

    ``where`` opens every message (the path of the file).

    Raises:
        DamagedError: it is not a manifest, contradicts itself, or was edited.
        UnsupportedError: it is of a newer format version.
    """
    document = Fields(parse_object(raw, where, f"{_AGAIN}.".capitalize()), where, _AGAIN)
    if "format" not in document or document["format"].value != FORMAT:
        document.wrong(f"is not a manifest of {FORMAT}")
    version = document["version"].whole(1)
    if version > VERSION:
        raise UnsupportedError(
            f"{where} has format version {version} and this tpshard reads up to {VERSION}; install a newer tpshard"
        )
    try:
        return _parsed(document)
    except (LayoutError, UnsupportedError) as error:
        document.wrong(f"contradicts itself: {error}")


def _parsed(document: Fields) -> Manifest:
    tp_size = document["tp_size"].whole(1, 1 << 20)
    rank_files = _rank_files(document["files"], tp_size)
    source = document["source"]
    files = parse_source_files(source["files"])
    try:
        kept = [reread(file, document.where) for file in files]
    except (DamagedError, UnsupportedError) as error:
        source.wrong(f"keeps a header that is none: {error}")
    tensors = tuple(Logical(t.name, t.dtype, t.shape) for file in kept for t in file.tensors)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        source.wrong("names a tensor twice")
    axes = {name: parse_axis(name, item.mapping()) for name, item in document["axes"].pairs()}
    dims, notes = _dims_of(document, tensors, axes, tp_size)
    index = source["index"]
    algorithm = document["algorithm"].text()
    manifest = Manifest(
        tp_size,
        tensors,
        dims,
        notes,
        {alias: target.text() for alias, target in document["aliases"].pairs()},
        Origin(
            source["label"].text(),
            document["family"].text(),
            document["config_sha256"].text(),
            files,
            None
            if index.value is None
            else (plain_name(index["name"]), unpacked(index["bytes"], sourcefiles.LARGEST_FRAME)),
            tuple(source["digests"].texts()),
        ),
        tuple(
            SideFile(plain_name(item["path"]), item["size"].whole(), item["sha256"].text())
            for item in document["side_files"].items()
        ),
        rank_files,
        algorithm,
        document["max_file_bytes"].whole(),
    )
    if algorithm not in ("", *ALGORITHMS):
        document["algorithm"].wrong(f"is {algorithm!r}, a digest that this tpshard does not know")
    if len(manifest.origin.digests) != (len(tensors) if algorithm else 0):
        source["digests"].wrong(f"has {len(manifest.origin.digests)} digests for {len(tensors)} tensors")
    if manifest.layout.digest != document["layout"].text():
        document["layout"].wrong("does not belong to the cuts that the manifest describes")
    if manifest.content != document["content"].text():
        document["content"].wrong("does not belong to the tensors and digests that the manifest lists")
    try:
        intact = document[_CHECKSUM].text() == _checksum(document.value)
    except RecursionError:
        intact = False
    if not intact:
        document.wrong("is damaged or was edited: its checksum does not fit")
    return manifest


def _rank_files(item: Fields, tp_size: int) -> tuple[RankFile, ...]:
    files = tuple(
        RankFile(
            plain_name(file["name"]),
            file["rank"].whole(0, tp_size - 1),
            file["size"].whole(),
            tuple(file["digests"].texts()),
        )
        for file in item.items()
    )
    ranks = {file.rank for file in files}
    if len(ranks) < tp_size:  # before anything is worked out for tp_size ranks, however many that claims to be
        lacking = next(rank for rank in range(tp_size) if rank not in ranks)
        item.wrong(f"lists no file for rank {lacking} of {tp_size}")
    return files


def _dims_of(
    document: Fields, tensors: Sequence[Logical], axes: Mapping[str, Axis], tp_size: int
) -> tuple[dict[str, tuple[Dim, ...]], dict[str, Note]]:
    numbered: list[Dim] = []
    room = LARGEST_CUTS // tp_size
    for item in document["dims"].items():
        texts = item["segments"].texts()
        room -= len(texts)
        if room < 0:
            document["dims"].wrong(f"lists more segments than {tp_size} ranks of any model have")
        dim = parse_dim(texts, axes)
        if len(item["ranks"].texts()) != tp_size:
            item.wrong(f"lists the runs of {len(item['ranks'].texts())} ranks where there are {tp_size}")
        if [runs_text(runs) for runs in partition(dim, tp_size).ranks] != item["ranks"].texts():
            item.wrong("lists runs that do not follow from its segments")
        numbered.append(dim)
    by_name: dict[str, Fields] = {}
    by_pattern: dict[str, Fields] = {}
    for item in document["tensors"].items():
        if "names" in item:
            by_name.update(dict.fromkeys(item["names"].texts(), item))
        else:
            by_pattern[item["pattern"].text()] = item
    dims: dict[str, tuple[Dim, ...]] = {}
    notes: dict[str, Note] = {}
    known: dict[tuple[int, tuple[int, ...]], tuple[tuple[Dim, ...], Note]] = {}
    for tensor in tensors:
        found = by_name.get(tensor.name) or by_pattern.get(template_of(tensor.name)[0])
        if found is None:
            document["tensors"].wrong(f"does not describe {tensor.name}")
        if found["dtype"].value != tensor.dtype or found["shape"].value != list(tensor.shape):
            found.wrong(f"gives another dtype or shape than the header of {tensor.name}: {tensor.dtype} {tensor.shape}")
        key = id(found.value), tensor.shape
        if key not in known:
            room -= 1 + len(tensor.shape)
            if room < 0:
                document["tensors"].wrong(f"describes more kinds of tensors than {tp_size} ranks of any model have")
            cut = [None if item.value is None else numbered_at(item, numbered) for item in found["cut"].items()]
            whole = [dim or replicated(length) for dim, length in zip(cut, tensor.shape, strict=False)]
            if len(cut) != len(tensor.shape) or [dim.extent for dim in whole] != list(tensor.shape):
                found.wrong(f"does not fit the shape {list(tensor.shape)} of {tensor.name}")
            known[key] = tuple(whole), Note(found["role"].text(), found["note"].text())
        dims[tensor.name], notes[tensor.name] = known[key]
    return dims, notes


def numbered_at(item: Fields, numbered: Sequence[Dim]) -> Dim:
    """The dimension with the number that the field gives."""
    return numbered[item.whole(0, len(numbered) - 1)]
