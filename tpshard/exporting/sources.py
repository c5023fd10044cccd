"""Opens whatever holds a model: a checkpoint, shards, or an engine's directory."""

from __future__ import annotations

import os

from tpshard.shards import is_shards

from .given import Given, open_model
from .reading import looks_like, open_engine


def open_any(path: str | os.PathLike[str], engine: str | None = None) -> Given:
    """Open what ``path`` is; with ``engine`` as a directory of that engine.

    Raises:
        UsageError, UnsupportedError, DamagedError, StorageError: as :func:`tpshard.exporting.given.open_model` and
            :func:`tpshard.exporting.reading.open_engine`.
    """
    if engine is not None or (not is_shards(path) and looks_like(path)):
        return open_engine(path, engine)
    return open_model(path)
