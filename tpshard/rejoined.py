"""Shards as the checkpoint that they were cut from, by what their manifest keeps of it; no tensor data is read."""

from __future__ import annotations

from dataclasses import dataclass

from . import manifest as manifests
from .errors import DamagedError, UnsupportedError
from .listing import shown
from .opened import read_small
from .quantisation.separate import with_separate
from .shards import Shards
from .source import SideFile, Source, SourceIndex
from .sourcefiles import reread
from .strictjson import parse_config

_LARGEST_CONFIG = 16 << 20


@dataclass
class RejoinedSource(Source):
    """A source whose files are not on disk: its tensors lie in the ranks' files."""

    shards: Shards | None = None

    def check_unchanged(self) -> None:
        """Raise DamagedError if a rank's file is no longer the one that was opened."""
        if self.shards is not None:
            self.shards.check_unchanged()


def rejoined(shards: Shards) -> RejoinedSource:
    """The checkpoint that shards were cut from, with the side files that lie beside the shards now.

    Raises:
        UnsupportedError: they are of an adapter, which has no config of its model.
        DamagedError: config.json is missing or damaged.
    """
    manifest = shards.manifest
    if manifest.is_adapter:
        raise UnsupportedError(f"{shown(shards.root)} holds shards of an adapter, which is not quantised")
    path = shards.root / manifest.config_name
    if not any(side.path == manifest.config_name for side in manifest.side_files):
        raise DamagedError(f"{shown(path)} is missing, which says how matrices are quantised; copy the directory again")
    raw = read_small(path, _LARGEST_CONFIG)
    index = manifest.origin.index
    return RejoinedSource(
        root=shards.root,
        label=manifest.origin.label,
        config=with_separate(parse_config(raw, shown(path), "put the original back"), shards.root),
        config_raw=raw,
        files=tuple(reread(file, manifests.NAME) for file in manifest.origin.files),
        index=None if index is None else SourceIndex(*index),
        side_files=tuple(SideFile(side.path, side.size) for side in manifest.side_files),
        left_out=manifest.origin.left_out,
        warnings=(),
        config_name=manifest.config_name,
        shards=shards,
    )
