"""Compares what a rank stores with the source, row by row, without arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tpshard.intervals import PAD

from .stores import TILE_BYTES, Part, Store, clipped_runs, padded_positions


class RowDifference(NamedTuple):
    """The worst row: relative L2 error, largest difference, index of the row in the whole tensor (-1: padding)."""

    error: float
    max_abs: float
    row: int
    rows: int  # how many differ


def compare_rows(source: Store, whole: Part, store: Store, part: Part) -> RowDifference | None:
    """Compare all that a holder stores of a tensor with the source, by bits; None where they are equal.

    Rows are indices of the first dimension (a scalar is one row). Padding must be zero.
    """
    worst, count = RowDifference(0.0, 0.0, -2, 0), 0
    for index, found, expected in _pairs(source, whole, store, part):
        same = _bits(found) == _bits(expected)
        if bool(same.all()):
            continue
        flat = same.flatten(1) if same.dim() > 1 else same[:, None]
        for at in torch.nonzero(~flat.all(1)).flatten().tolist():
            count += 1
            gap = (found[at].double() - expected[at].double()).flatten()
            size = float(torch.linalg.vector_norm(expected[at].double().flatten()))
            error = float(torch.linalg.vector_norm(gap)) / size if size else math.inf
            if not math.isfinite(error):
                error = math.inf
            if error >= worst.error:
                largest = float(gap.abs().max())
                worst = RowDifference(error, largest, -1 if index < 0 else index + at, 0)
    return worst._replace(rows=count) if count else None


def _pairs(source: Store, whole: Part, store: Store, part: Part) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """``(index of the first row, rows found, rows expected)``; index -1 for padding, expected zero."""
    shape = part.shape
    if not shape:
        yield 0, store.raw(part, 0, 1).view(1), source.raw(whole, 0, 1).view(1)
        return
    row_bytes = max(1, _row_bytes(whole))
    step = max(1, TILE_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        found = store.raw(part, start, stop)
        for at, index, length in clipped_runs(part.runs(0), start, stop):
            expected = source.raw(whole, index, index + length)
            for dim in range(1, len(shape)):
                expected = _taken(expected, part, dim)
            yield index, found[at : at + length], expected
        for at, length in padded_positions(part.runs(0)):
            low, high = max(at, start), min(at + length, stop)
            if high > low:
                rows = found[low - start : high - start]
                yield -1, rows, torch.zeros_like(rows)


def _taken(whole: torch.Tensor, part: Part, dim: int) -> torch.Tensor:
    runs = part.runs(dim)
    if len(runs) == 1 and runs[0].start == 0 and runs[0].length == whole.shape[dim]:
        return whole
    shape = list(whole.shape)
    pieces = []
    for run in runs:
        shape[dim] = run.length
        pieces.append(whole.new_zeros(shape) if run.start == PAD else whole.narrow(dim, run.start, run.length))
    return torch.cat(pieces, dim)


def _row_bytes(part: Part) -> int:
    count = 1
    for length in part.full_shape[1:]:
        count *= length
    return count * 8


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    if tensor.is_floating_point():
        return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return tensor
