"""Opens whatever holds a model: a checkpoint, shards, or an engine's directory."""

from __future__ import annotations

import os
import re

from tpshard.shards import is_shards

from .given import Given, open_model
from .reading import looks_like, open_engine

# Weights of a checkpoint: releases hold an engine's files beside them (Mistral's, Llama's consolidated.00.pth).
_CHECKPOINT = re.compile(r"(?:model|pytorch_model|adapter_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)")


def is_engines(path: str | os.PathLike[str], engine: str | None = None) -> bool:
    """Whether a directory is to be read as an engine's: one was named, or the names of its files say so.

    A directory with a checkpoint's weights is a checkpoint, whatever lies beside them.
    """
    if engine is not None:
        return True
    if not os.path.isdir(path) or is_shards(path):
        return False
    return not any(_CHECKPOINT.fullmatch(name) for name in os.listdir(path)) and bool(looks_like(path))


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
