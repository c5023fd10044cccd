"""Opens whatever holds a model: a checkpoint, shards, or an engine's directory."""

from __future__ import annotations

import os

from tpshard.shards import is_shards

from .given import Given, open_model
from .reading import looks_like, open_engine


def is_engines(path: str | os.PathLike[str], engine: str | None = None) -> bool:
    """Whether a directory is to be read as an engine's: one was named, or the names of its files say so."""
    if engine is not None:
        return True
    return os.path.isdir(path) and not is_shards(path) and bool(looks_like(path))


def open_any(
    path: str | os.PathLike[str], engine: str | None = None, *, config: str | os.PathLike[str] | None = None
) -> Given:
    """Open what ``path`` is; with ``engine`` as a directory of that engine, whose config.json may lie in ``config``.

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: as :func:`tpshard.exporting.given.open_model` and
            :func:`tpshard.exporting.reading.open_engine`.
    """
    if is_engines(path, engine):
        return open_engine(path, engine, config=config)
    return open_model(path)
