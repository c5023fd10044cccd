"""A scratch copy of a directory of shards, in which one fault is planted.

Tensors are changed in memory and written to a copy whose other files are hard links. *Re-sealing* gives
the changed tensors new digests in the manifest, and the manifest a new checksum, as a splitter with a bug
would have written them: then structure and digest have nothing to see, and a comparison of the run has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tpshard import manifest as manifests
from tpshard.axes import Dim
from tpshard.digest import digest_of
from tpshard.header import TensorInfo
from tpshard.intervals import PAD
from tpshard.manifest import Manifest, RankFile
from tpshard.numerics.stores import DTYPES
from tpshard.partition import partition
from tpshard.shards import Shards

CONFIG = "config.json"


class NotHereError(Exception):
    """The fault has no place in this model at this degree."""


class Scratch:
    """One copy of ``shards`` in the making.

    Args:
        shards: good shards; they are only read.
        source: the directory of the checkpoint that they were cut from.
        other: shards of the same config and degree with other weights, None where no fault needs them.
        degree: shards of the same model at another degree, likewise.
    """

    def __init__(self, shards: Shards, source: Path, other: Shards | None = None, degree: Shards | None = None) -> None:
        self.shards, self.source, self.other, self.degree = shards, source, other, degree
        self.manifest = shards.manifest
        self.tp_size = shards.manifest.tp_size
        self.config: dict[str, Any] = json.loads((shards.root / CONFIG).read_bytes())
        self._config = json.dumps(self.config)
        self._changed: dict[tuple[str, int], torch.Tensor] = {}
        self._after: list[Callable[[Path], None]] = []

    # -- what is there --------------------------------------------------------------------------

    def names(self, *roles: str) -> list[str]:
        """The tensors of these roles, in source order."""
        return [t.name for t in self.manifest.tensors if self.manifest.notes[t.name].role in roles]

    def last(self, *roles: str) -> str:
        """The last tensor of these roles: its layer is the one that faults are planted in."""
        names = self.names(*roles)
        if not names:
            raise NotHereError(f"no tensor of role {' or '.join(roles)}")
        return names[-1]

    def layer(self, name: str, *roles: str) -> list[str]:
        """The tensors of these roles in the layer of ``name``."""
        prefix = layer_of(name)
        return [other for other in self.names(*roles) if layer_of(other) == prefix]

    def dims(self, name: str) -> tuple[Dim, ...]:
        return self.manifest.dims[name]

    def cut_dim(self, name: str) -> int:
        """The dimension along which a tensor is cut."""
        for number, dim in enumerate(self.dims(name)):
            if dim.axes:
                return number
        raise NotHereError(f"{name} is whole")

    def get(self, name: str, rank: int) -> torch.Tensor:
        """What a rank stores of a tensor: a copy, with what was changed in it."""
        if (name, rank) in self._changed:
            return self._changed[name, rank].clone()
        return stored(self.shards, name, rank).clone()

    def put(self, name: str, rank: int, tensor: torch.Tensor) -> None:
        """Change what a rank stores.

        Raises:
            NotHereError: it has another shape there.
        """
        old = stored(self.shards, name, rank)
        if tensor.shape != old.shape:
            raise NotHereError(f"{name} is {list(old.shape)} on rank {rank}, not {list(tensor.shape)}")
        self._changed[name, rank] = tensor.to(old.dtype).contiguous()

    def change(self, name: str, rank: int, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change what a rank stores by a function."""
        self.put(name, rank, by(self.get(name, rank)))

    def touched(self) -> bool:
        """Whether anything was changed yet."""
        return bool(self._changed)

    def ranks(self) -> range:
        return range(self.tp_size)

    def whole(self, name: str) -> torch.Tensor:
        """The source's tensor."""
        return original(self.source, name).clone()

    def runs(self, name: str, rank: int, dim: int) -> list[int]:
        """The index of the whole tensor at every stored position of a dimension, -1 for padding."""
        return indices(partition(self.dims(name)[dim], self.tp_size).ranks[rank])

    def slots(self, name: str, rank: int, dim: int, view: str, slot: int = 0) -> dict[int, list[int]]:
        """Stored positions of every unit of a view that a rank holds, in the ``slot``-th run through the units.

        ``[Q;K;V]`` has its keys in slot 0 and its values in slot 1 of the view ``kv``.
        """
        places = {index: at for at, index in enumerate(self.runs(name, rank, dim)) if index >= 0}
        found: dict[int, list[int]] = {}
        seen: dict[int, int] = {}
        at = 0
        for segment in self.dims(name)[dim].segments:
            if segment.axis is not None and segment.view == view:
                for unit in range(segment.start, segment.stop):
                    number = seen[unit] = seen.get(unit, -1) + 1
                    first = at + (unit - segment.start) * segment.size
                    held = [places[i] for i in range(first, first + segment.size) if i in places]
                    if number == slot and held:
                        found[unit] = held
            at += segment.length
        if not found:
            raise NotHereError(f"{name} has no slot {slot} of {view} on rank {rank}")
        return found

    def afterwards(self, act: Callable[[Path], None]) -> None:
        """Do something to the finished copy: to whole files."""
        self._after.append(act)

    # -- writing --------------------------------------------------------------------------------

    def write(self, directory: Path, *, reseal: bool) -> None:
        """Make the copy.

        Raises:
            NotHereError: the fault changes no byte here.
        """
        changed = {
            key: tensor
            for key, tensor in self._changed.items()
            if not torch.equal(bits(tensor), bits(stored(self.shards, *key)))
        }
        config = json.dumps(self.config) != self._config
        if not changed and not config and not self._after:
            raise NotHereError("the fault changes nothing")
        shutil.copytree(self.shards.root, directory, copy_function=os.link)
        manifest = self.manifest
        for number, file in enumerate(self.shards.files):
            rank = manifest.files[number].rank
            mine = [(info, changed[info.name, rank]) for info in file.tensors if (info.name, rank) in changed]
            if mine:
                path = directory / file.name
                write_tensors(path, mine)
                manifest = _digested(manifest, number, file.tensors, {info.name: tensor for info, tensor in mine})
        if config:
            raw = json.dumps(self.config, indent=2).encode() + b"\n"
            rewrite(directory / CONFIG, raw)
            manifest = _reconfigured(manifest, raw)
        if reseal:
            rewrite(directory / manifests.NAME, manifests.dumped(manifest))
        for act in self._after:
            act(directory)


def layer_of(name: str) -> str:
    """``model.layers.1`` of ``model.layers.1.mlp.gate.weight``; "" outside layers."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ""


def indices(runs: Any) -> list[int]:
    """Runs as one index a position, -1 for padding."""
    return [(-1 if run.start == PAD else run.start + step) for run in runs for step in range(run.length)]


def _located(shards: Shards, name: str, rank: int) -> tuple[Path, TensorInfo]:
    for file, recorded in zip(shards.files, shards.manifest.files, strict=True):
        if recorded.rank == rank:
            for info in file.tensors:
                if info.name == name:
                    return shards.root / file.name, info
    raise NotHereError(f"rank {rank} has no {name}")


def stored(shards: Shards, name: str, rank: int) -> torch.Tensor:
    """What the files hold of a tensor on a rank."""
    return _stored(shards.root, *_located(shards, name, rank))


@lru_cache(maxsize=65536)
def _stored(root: Path, path: Path, info: TensorInfo) -> torch.Tensor:
    with path.open("rb") as file:
        file.seek(info.offset)
        raw = bytearray(file.read(info.nbytes))
    return torch.frombuffer(raw, dtype=DTYPES[info.dtype]).view(info.shape) if raw else torch.empty(info.shape)


@lru_cache(maxsize=8)
def _originals(source: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(source / "model.safetensors")
    return tensors


def original(source: Path, name: str) -> torch.Tensor:
    """A tensor of the source."""
    return _originals(source)[name]


def forget() -> None:
    """Drop the tensors that are kept in memory."""
    _stored.cache_clear()
    _originals.cache_clear()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def data_of(tensor: torch.Tensor) -> bytes:
    raw: bytes = bits(tensor).numpy().tobytes()
    return raw


def write_tensors(path: Path, tensors: list[tuple[TensorInfo, torch.Tensor]]) -> None:
    """Write tensors into a private copy of a file."""
    rewrite(path, path.read_bytes())
    with path.open("r+b") as file:
        for info, tensor in tensors:
            file.seek(info.offset)
            file.write(data_of(tensor))


def rewrite(path: Path, data: bytes) -> None:
    """Put a new file in the place of one, which may be a hard link to another's."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _digested(
    manifest: Manifest, number: int, infos: tuple[TensorInfo, ...], changed: dict[str, torch.Tensor]
) -> Manifest:
    digest = digest_of(manifest.algorithm)
    files = list(manifest.files)
    old: RankFile = files[number]
    digests = tuple(
        digest(memoryview(data_of(changed[info.name]))) if info.name in changed else was
        for info, was in zip(infos, old.digests, strict=True)
    )
    files[number] = replace(old, digests=digests)
    return replace(manifest, files=tuple(files))


def _reconfigured(manifest: Manifest, raw: bytes) -> Manifest:
    sha256 = hashlib.sha256(raw).hexdigest()
    sides = tuple(
        replace(side, size=len(raw), sha256=sha256) if side.path == CONFIG else side for side in manifest.side_files
    )
    return replace(manifest, side_files=sides, origin=replace(manifest.origin, config_sha256=sha256))


def paired(ranks: range) -> Iterator[tuple[int, int]]:
    """Pairs of ranks, neighbours first."""
    for gap in range(1, len(ranks)):
        for rank in range(len(ranks) - gap):
            yield rank, rank + gap
