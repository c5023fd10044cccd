"""Reads ``tpshard.json`` back, and checks that it agrees with itself; nothing in it is taken on trust."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from . import sourcefiles
from .axes import Axis, Dim, replicated
from .collection import uncollected
from .digest import ALGORITHMS, WIDTHS, Digests
from .dimtext import parse_axis, parse_dim, runs_text
from .errors import DamagedError, LayoutError, UnsupportedError
from .fields import Fields
from .manifest import CHECKSUM, FORMAT, VERSION, Manifest, Note, Origin, RankFile, SideFile, axis_units, checksum
from .matching import Logical
from .partition import partition
from .sourcefiles import parse_source_files, plain_name, reread, unpacked
from .strictjson import parse_object
from .table import template_of

LARGEST_CUTS = 1 << 22  # segments of all dimensions on all ranks; 200 kinds of tensors on 64 ranks have some 50,000
_HEX = re.compile("[0-9a-f]*")
_AGAIN = "copy the directory again, or split again"


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
    algorithm = document["algorithm"].text()
    if algorithm not in ("", *ALGORITHMS):
        document["algorithm"].wrong(f"is {algorithm[:80]!r}, a digest that this tpshard does not know")
    rank_files = _rank_files(document["files"], tp_size, algorithm)
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
    _check_units(document["axes"], axes, tp_size)
    index = source["index"]
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
            _digests(source["digests"], algorithm),
            tuple(source["left_out"].texts()),
        ),
        tuple(
            SideFile(plain_name(item["path"]), item["size"].whole(), item["sha256"].text())
            for item in document["side_files"].items()
        ),
        rank_files,
        algorithm,
        document["max_file_bytes"].whole(),
    )
    if len(manifest.origin.digests) != (len(tensors) if algorithm else 0):
        source["digests"].wrong(f"has {len(manifest.origin.digests)} digests for {len(tensors)} tensors")
    if manifest.layout.digest != document["layout"].text():
        document["layout"].wrong("does not belong to the cuts that the manifest describes")
    if manifest.content != document["content"].text():
        document["content"].wrong("does not belong to the tensors and digests that the manifest lists")
    try:
        intact = document[CHECKSUM].text() == checksum(document.value)
    except RecursionError:
        intact = False
    if not intact:
        document.wrong("is damaged or was edited: its checksum does not fit")
    return manifest


def _digests(item: Fields, algorithm: str) -> Sequence[str]:
    """Digests one after the other in one text, which is empty where none were taken."""
    text = item.text()
    if not text:
        return ()
    if not algorithm or len(text) % WIDTHS[algorithm] or not _HEX.fullmatch(text):
        item.wrong(f"is not a row of digests by {algorithm or 'no algorithm'}")
    return Digests(text, WIDTHS[algorithm])


def _rank_files(item: Fields, tp_size: int, algorithm: str) -> tuple[RankFile, ...]:
    files = tuple(
        RankFile(
            plain_name(file["name"]),
            file["rank"].whole(0, tp_size - 1),
            file["size"].whole(),
            _digests(file["digests"], algorithm),
        )
        for file in item.items()
    )
    ranks = {file.rank for file in files}
    if len(ranks) < tp_size:  # before anything is worked out for tp_size ranks, however many that claims to be
        lacking = next(rank for rank in range(tp_size) if rank not in ranks)
        item.wrong(f"lists no file for rank {lacking} of {tp_size}")
    return files


def _check_units(item: Fields, axes: Mapping[str, Axis], tp_size: int) -> None:
    """The units given for every rank are those that follow from the axis."""
    room = LARGEST_CUTS // tp_size
    for name, axis in axes.items():
        room -= len(axis.views())
        if room < 0:
            item.wrong(f"lists more axes than {tp_size} ranks of any model have")
        if item[name]["ranks"].value != axis_units(axis, tp_size):
            item[name]["ranks"].wrong("gives units that do not follow from the axis")


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
        if item["extent"].whole() != dim.extent:
            item["extent"].wrong(f"is {item['extent'].value} where its segments have {dim.extent}")
        if len(item["ranks"].texts()) != tp_size:
            item.wrong(f"lists the runs of {len(item['ranks'].texts())} ranks where there are {tp_size}")
        if [runs_text(runs) for runs in partition(dim, tp_size).ranks] != item["ranks"].texts():
            item.wrong("lists runs that do not follow from its segments")
        numbered.append(dim)
    by_name: dict[str, Fields] = {}
    by_pattern: dict[str, Fields] = {}
    for item in document["tensors"].items():
        pattern = item["pattern"].text()
        if "names" in item:
            by_name.update(dict.fromkeys(item["names"].texts(), item))
        elif by_pattern.setdefault(pattern, item) is not item:
            item.wrong(f"describes the tensors {pattern!r:.80} again")
    dims: dict[str, tuple[Dim, ...]] = {}
    notes: dict[str, Note] = {}
    known: dict[tuple[int, tuple[int, ...]], tuple[tuple[Dim, ...], Note]] = {}
    counted: Counter[int] = Counter()
    for tensor in tensors:
        pattern = template_of(tensor.name)[0]
        found = by_name.get(tensor.name) or by_pattern.get(pattern)
        if found is None or found["pattern"].value != pattern:
            document["tensors"].wrong(f"does not describe {tensor.name}")
        counted[id(found.value)] += 1
        if found["dtype"].value != tensor.dtype or found["shape"].value != list(tensor.shape):
            found.wrong(f"gives another dtype or shape than the header of {tensor.name}: {tensor.dtype} {tensor.shape}")
        key = id(found.value), tensor.shape
        if key not in known:
            room -= 1 + len(tensor.shape)
            if room < 0:
                document["tensors"].wrong(f"describes more kinds of tensors than {tp_size} ranks of any model have")
            cut = [None if item.value is None else _numbered_at(item, numbered) for item in found["cut"].items()]
            whole = [dim or replicated(length) for dim, length in zip(cut, tensor.shape, strict=False)]
            if len(cut) != len(tensor.shape) or [dim.extent for dim in whole] != list(tensor.shape):
                found.wrong(f"does not fit the shape {list(tensor.shape)} of {tensor.name}")
            known[key] = tuple(whole), Note(found["role"].text(), found["note"].text())
        dims[tensor.name], notes[tensor.name] = known[key]
    for item in document["tensors"].items():
        if item["count"].whole(1) != counted[id(item.value)]:
            item["count"].wrong(f"is {item['count'].value} where {counted[id(item.value)]} tensors are described")
        if "names" in item and len(item["names"].texts()) != item["count"].value:
            item["names"].wrong(f"has {len(item['names'].texts())} names for {item['count'].value} tensors")
    return dims, notes


def _numbered_at(item: Fields, numbered: Sequence[Dim]) -> Dim:
    """The dimension with the number that the field gives."""
    return numbered[item.whole(0, len(numbered) - 1)]
