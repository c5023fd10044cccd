"""Matrices and tables that are never held whole: products and look-ups tile by tile from the files.

A rank's part of a matrix is multiplied as it is stored and its result put where the rank's outputs are:
the same sum as with a full matrix that is zero elsewhere, at the cost of the part alone.
"""

from __future__ import annotations

from typing import Any

import torch

from tpshard.intervals import Runs

from .coverage import Coverage
from .stores import Part, Store, clipped_runs, spans


class StreamedMatrix:
    """One stored matrix as a linear map on inputs and to outputs of full width.

    Args:
        parameter: its name in the model, for coverage.
        transposed: stored input x output (GPT-2's ``Conv1D``) instead of output x input.
        compact: give only the outputs that the holder has, in stored order, padding included.
    """

    def __init__(
        self,
        store: Store,
        part: Part | None,
        full_shape: tuple[int, ...],
        compute: torch.dtype,
        tile_bytes: int,
        parameter: str,
        transposed: bool = False,
        compact: bool = False,
        watch: Any = None,
    ) -> None:
        self.store, self.part, self.compute, self.tile_bytes = store, part, compute, tile_bytes
        self.parameter, self.transposed, self.compact, self.watch = parameter, transposed, compact, watch
        self.outputs = full_shape[1] if transposed else full_shape[0]

    def _runs(self) -> tuple[Runs, Runs]:
        """Runs of the outputs and of the inputs that the holder has."""
        assert self.part is not None
        return (self.part.runs(1), self.part.runs(0)) if self.transposed else (self.part.runs(0), self.part.runs(1))

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """``x [..., in]`` to ``[..., out]``."""
        flat = x.reshape(-1, x.shape[-1])
        if self.part is None:
            return x.new_zeros((*x.shape[:-1], 0 if self.compact else self.outputs))
        out_runs, in_runs = self._runs()
        held = sum(run.length for run in out_runs)
        local = flat.new_zeros((len(flat), held)) if self.transposed else flat.new_empty((len(flat), held))
        inputs = flat if self.transposed else _select(flat, in_runs)
        for start, tile in self.store.tiles(self.part, self.compute, self.tile_bytes, self.watch):
            tile = tile.to(x.device)
            if self.transposed:
                for at, index, length in clipped_runs(in_runs, start, start + len(tile)):
                    local += flat[:, index : index + length] @ tile[at : at + length]
            else:
                torch.mm(inputs, tile.T, out=local[:, start : start + len(tile)])
        if not self.compact:
            local = _placed(local, out_runs, self.outputs)
        return local.view(*x.shape[:-1], local.shape[-1])

    def back(self, g: torch.Tensor, inputs: int) -> torch.Tensor:
        """The cotangent of the inputs; for a holder of the whole matrix."""
        flat = g.reshape(-1, g.shape[-1])
        out = flat.new_zeros((len(flat), inputs))
        assert self.part is not None
        for start, tile in self.store.tiles(self.part, self.compute, self.tile_bytes):
            tile = tile.to(g.device)
            if self.transposed:
                out[:, start : start + len(tile)] = flat @ tile.T
            else:
                out += flat[:, start : start + len(tile)] @ tile
        return out.view(*g.shape[:-1], inputs)


def _select(flat: torch.Tensor, runs: Runs) -> torch.Tensor:
    if len(runs) == 1 and runs[0].start == 0 and runs[0].length == flat.shape[1]:
        return flat
    parts = [
        flat[:, start : start + length] if start >= 0 else flat.new_zeros((len(flat), length)) for start, length in runs
    ]
    return torch.cat(parts, 1) if parts else flat[:, :0]


def _placed(local: torch.Tensor, runs: Runs, width: int) -> torch.Tensor:
    if len(runs) == 1 and runs[0].start == 0 and runs[0].length == width:
        return local
    out = local.new_zeros((len(local), width))
    for at, index, length in spans(runs):
        out[:, index : index + length] = local[:, at : at + length]
    return out


class _Product(torch.autograd.Function):
    """The product for the reference: nothing of the matrix is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, matrix: StreamedMatrix, coverage: Coverage) -> Any:
        ctx.matrix, ctx.coverage = matrix, coverage
        ctx.save_for_backward(x)
        return matrix.apply(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (g,) = cotangents
        (x,) = ctx.saved_tensors
        matrix = ctx.matrix
        flat, back = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        if matrix.transposed:
            ctx.coverage.product(matrix.parameter, back, flat)
        else:
            ctx.coverage.product(matrix.parameter, flat, back)
        return (matrix.back(g, x.shape[-1]) if ctx.needs_input_grad[0] else None), None, None, None


def product(x: torch.Tensor, matrix: StreamedMatrix, coverage: Coverage | None) -> torch.Tensor:
    """The product, on a graph where ``coverage`` wants one."""
    if coverage is None:
        return matrix.apply(x)
    anchor = torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
    return _Product.apply(x, anchor, matrix, coverage)
