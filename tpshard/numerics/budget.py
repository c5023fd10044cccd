"""How little memory a lockstep run can do with, and in what tiles it reads for a given bound."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import nn

from tpshard.errors import UsageError

from .arguments import tables_of
from .batch import Batch
from .points import Point
from .skeleton import Skeleton
from .stores import TILE_BYTES

LEAST_TILE = 1 << 16  # bytes as stored
_TILES = 16  # parts of the bound that one tile may be
_HELD = 3  # of weights that are made whole: as read, as the model takes them, and a gradient
_AT_HEAD = 7  # outputs of full width at a time, as measured: original's, ranks', their sum, and cotangents with noise


def tile_bytes(max_memory: int) -> int:
    """The bytes of a tile, as stored, under a bound."""
    return max(LEAST_TILE, min(TILE_BYTES, max_memory // _TILES))


def require_memory(
    max_memory: int, skeleton: Skeleton, points: Mapping[str, Point], batch: Batch, compute: torch.dtype, tp_size: int
) -> None:
    """Refuse a bound that the run cannot keep.

    Raises:
        UsageError: names the smallest that it can.
    """
    least = least_memory(skeleton, points, batch, compute, tp_size)
    if max_memory < least:
        raise UsageError(
            f"--max-memory of {max_memory:,} bytes is too little to run {tp_size} ranks of this model on "
            f"{batch.tokens} tokens; give at least {-(-least >> 20)} MiB, or fewer tokens"
        )


def least_memory(
    skeleton: Skeleton, points: Mapping[str, Point], batch: Batch, compute: torch.dtype, tp_size: int
) -> int:
    """Bytes of weights and exchanged tensors that a run holds at its fullest, with the smallest tiles."""
    element = torch.finfo(compute).bits // 8
    tiles = LEAST_TILE * (1 + element)  # as stored, and converted from one byte an element at the least
    weights, width = 0, 0
    for path, module in skeleton.modules.items():
        point = points.get(path)
        shapes = {
            leaf: tuple(held.shape)
            for leaf, held in module._parameters.items()
            if held is not None and skeleton.recipe_of(f"{path}.{leaf}" if path else leaf) is not None
        }
        streamed = type(module).forward is nn.Linear.forward or (isinstance(module, nn.Embedding) and point is not None)
        rows = [_row(shape) if streamed or (point and point.experts) else prod(shape) for shape in shapes.values()]
        weights = max(weights, sum(rows))
        if point is not None and point.kind == "gather" and "weight" in shapes:
            width = max(width, shapes["weight"][0])
    hidden = max((int(table.weight.shape[-1]) for table in tables_of(skeleton.model)), default=0)
    places = batch.rows * batch.tokens
    exchanged = places * max(_AT_HEAD * width, 2 * (tp_size + 1) * hidden)
    return int(tiles + element * (_HELD * weights + exchanged))


def _row(shape: tuple[int, ...]) -> int:
    """Elements of a streamed matrix that are held at least; of a bank, one expert's matrix; a vector is held whole."""
    return int(prod(shape[1:] if len(shape) > 1 else shape))
