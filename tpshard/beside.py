"""What lies beside the ranks' files: config.json, the other side files and strangers, held against what was carried."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from . import manifest as manifests
from .config import CONFIG
from .errors import TpshardError
from .listing import CARD, shown, storage_error
from .manifest import Manifest
from .reports import Finding
from .sidefiles import file_sha256, size_of
from .strictjson import parse_config

_LARGEST_CONFIG = 16 << 20  # bytes; a source with a larger one is refused
_NAMED = 5  # strangers that a note names


@dataclass(frozen=True)
class Strangers:
    """Entries of a directory of shards that its manifest does not list, by name, sorted; hidden ones left out."""

    root: Path
    weights: tuple[str, ...]  # safetensors files
    others: tuple[str, ...]

    def notes(self) -> list[str]:
        """One line about the others; none where there are none."""
        if not self.others:
            return []
        more = f" and {len(self.others) - _NAMED} more" if len(self.others) > _NAMED else ""
        named = ", ".join(shown(name) for name in self.others[:_NAMED])
        return [f"{shown(self.root)} also holds what its manifest does not list: {named}{more}"]


def strangers(root: Path, manifest: Manifest) -> Strangers:
    """What lies in the directory of shards itself and is neither listed in the manifest nor the manifest.

    Raises:
        StorageError: the directory cannot be listed.
    """
    listed = [*(file.name for file in manifest.files), *(side.path for side in manifest.side_files)]
    known = {manifests.NAME, CARD, *(path.split("/", 1)[0] for path in listed)}
    weights: list[str] = []
    others: list[str] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.name in known or entry.name.startswith("."):
                    continue
                stray = entry.name.lower().endswith(".safetensors") and not entry.is_dir()
                (weights if stray else others).append(entry.name)
    except OSError as error:
        raise storage_error(error, root, "listing the directory") from None
    return Strangers(root, tuple(sorted(weights)), tuple(sorted(others)))


def side_structure(root: Path, manifest: Manifest) -> list[Finding]:
    """Side files that are missing or have another size than the manifest says.

    Raises:
        StorageError: one cannot be looked at.
    """
    out = []
    for side in manifest.side_files:
        path, size = root / side.path, size_of(root / side.path)
        if size is None:
            out.append(Finding("structure", side.path, "", f"{shown(path)} is missing"))
        elif size != side.size:
            message = f"{shown(path)} has {size} bytes where {side.size} were written"
            out.append(Finding("structure", side.path, "", message))
    return out


def config_structure(root: Path, manifest: Manifest) -> list[Finding]:
    """What a config.json that was changed since the split now implies and the tensors contradict.

    A config that is the source's was held against the tensors when they were cut; one that was changed
    without any bearing on names, shapes and cuts is told by its sha256, at the level *digest*.

    Raises:
        StorageError: it cannot be read.
    """
    path = root / CONFIG
    size = size_of(path)
    if manifest.is_adapter:  # its cut follows from the config of its base model, which does not lie here
        return []
    if size is None or file_sha256(path) == manifest.origin.config_sha256:
        return []
    why = "is too large to be read" if size > _LARGEST_CONFIG else _contradiction(path, manifest)
    if not why:
        return []
    message = f"{shown(path)} was changed since the split and no longer fits the tensors: {why}; put the original back"
    return [Finding("structure", CONFIG, "", message)]


def _contradiction(path: Path, manifest: Manifest) -> str:
    """Why the tensors cannot be those of the config, "" if they can."""
    from .matching import match
    from .registry import families, table_for

    if manifest.origin.family not in families():
        return ""  # cut by a table that was given and is not installed: the level digest tells that it was changed
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise storage_error(error, path, "reading it") from None
    try:
        config = parse_config(raw, shown(path), "put the original back")
        matched = match(table_for(config), manifest.tensors, copy_unknown=True)
    except TpshardError as error:
        return str(error)
    for tensor in manifest.tensors:
        if matched.dims[tensor.name] != manifest.dims[tensor.name]:
            return f"it implies another cut of {tensor.name} than the one that was made"
    return ""


def compare_sides(
    root: Path, manifest: Manifest, other: Path, theirs: Iterable[str], against: str | os.PathLike[str],
    made: Mapping[str, bytes] = MappingProxyType({}),
) -> list[Finding]:  # fmt: skip
    """Side files that are not, byte for byte, those beside ``against``, or that only one of the two has.

    ``theirs`` are the paths of the side files below ``other``, the directory of ``against``; files that are ``made``
    for the shards count as if they lay there.

    Raises:
        StorageError: one cannot be read.
    """
    mine = [side.path for side in manifest.side_files]
    there = {*theirs, *made}
    out = []
    for path in sorted({*mine, *there}):
        if path not in mine:
            why = f"is beside {against} and was not carried into {shown(root)}"
        elif path not in there:
            why = f"is in {shown(root)} and not beside {against}"
        elif path in made:
            if file_sha256(root / path) == hashlib.sha256(made[path]).hexdigest():
                continue
            why = f"in {shown(root)} is not what the values of {against} have"
        elif size_of(root / path) != size_of(other / path) or file_sha256(root / path) != file_sha256(other / path):
            why = f"in {shown(root)} differs from the one beside {against}"
        else:
            continue
        out.append(Finding("bytes", path, "", f"{path} {why}"))
    return out
