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
from .axes import Axis, Dim
from .collection import uncollected
from .config import ADAPTER_CONFIG, CONFIG
from .degrees import axes_of
from .dimtext import axis_fields, dim_texts, runs_text
from .errors import LayoutError, UnsupportedError
from .layout import Layout, cut_layout
from .matching import Logical
from .partition import partition
from .sourcefiles import SourceFile, packed
from .table import template_of

NAME = "tpshard.json"
FORMAT = "tpshard"
VERSION = 1
LARGEST = 1 << 30  # bytes of a manifest; 10,000 tensors on 64 ranks take about 30 MB
_CutNumbers = tuple[int | None, ...]  # by dimension: its number in the manifest's list, None where it is kept whole

CHECKSUM = "checksum"


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
    """A file of a rank, with the digest of every tensor in it, in stored order; empty where none was taken."""

    name: str
    rank: int
    size: int
    digests: Sequence[str]


@dataclass(frozen=True)
class Origin:
    """The checkpoint that was cut."""

    label: str
    family: str
    config_sha256: str
    files: tuple[SourceFile, ...]
    index: tuple[str, bytes] | None
    digests: Sequence[str]  # of every logical tensor, in source order; empty where none was taken
    left_out: tuple[str, ...] = ()  # "path (why)" of what lay beside the weights and was not carried

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

    def is_held_whole(self, name: str) -> bool:
        """Whether every rank holds a tensor whole since its axes have fewer parts than there are ranks.

        What the table says of a cut (added once, needs a sum) is then not so. A bias goes with its matrix.
        """
        matrix = f"{name.removesuffix('bias')}weight" if name.endswith("bias") else name
        dims = self.dims.get(matrix, self.dims[name])
        axes = [axis for dim in dims for axis in dim.axes]
        return bool(axes) and all(axis.is_whole(self.tp_size) for axis in axes)

    @cached_property
    def config_name(self) -> str:
        """The side file that says what was cut: config.json of a model, adapter_config.json of an adapter."""
        return ADAPTER_CONFIG if any(side.path == ADAPTER_CONFIG for side in self.side_files) else CONFIG

    @property
    def is_adapter(self) -> bool:
        """Whether it is a PEFT adapter that was cut, and not a model (of which an adapter beside it is no part)."""
        return self.config_name == ADAPTER_CONFIG

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
        "axes": {axis.name: {**axis_fields(axis), "ranks": axis_units(axis, manifest.tp_size)} for axis in axes},
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
            "digests": "".join(origin.digests),
            "left_out": list(origin.left_out),
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
        "files": [
            {"name": f.name, "rank": f.rank, "size": f.size, "digests": "".join(f.digests)} for f in manifest.files
        ],
    }
    members = _members(document)
    del document
    members[CHECKSUM] = _text(_sum_of(members))
    return b"{\n" + b",\n".join([f" {_text(key)}: {members.pop(key)}".encode() for key in sorted(members)]) + b"\n}\n"


def checksum(document: Mapping[str, Any]) -> str:
    """sha256 over the canonical text of everything but the checksum itself, hex: finds what no other field covers."""
    return _sum_of(_members({key: value for key, value in document.items() if key != CHECKSUM}))


def _sum_of(members: Mapping[str, str]) -> str:
    state = hashlib.sha256()
    for key in sorted(members):
        state.update(f" {_text(key)}: ".encode())
        state.update(members[key].encode())
        state.update(b"\n")
    return state.hexdigest()


def axis_units(axis: Axis, tp_size: int) -> dict[str, list[str]]:
    """The units ``START:STOP`` (half-open) that every rank holds of an axis, by view."""
    return {view: [f"{start}:{stop}" for start, stop in axis.bounds(view, tp_size)] for view in axis.views()}


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


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(", ", ": "))


def _members(document: Mapping[str, Any]) -> dict[str, str]:
    """The members of the top level as sorted JSON, lists of objects with a line for each entry."""
    members = {}
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            members[key] = "[\n  " + ",\n  ".join(map(_text, value)) + "\n ]"
        else:
            members[key] = _text(value)
    return members
