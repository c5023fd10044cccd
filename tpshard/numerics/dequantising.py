"""Quantised matrices as the verifier computes with them: their values, made on the fly from what each holder stores.

The source's come from the source's tensors and every rank's from the rank's own, so that packed integers, scales or
zero points of another rank, an order of inputs that counts from elsewhere, or a shifted row show as wrong sums.
Nothing is held but the tile at hand. The model is built without its quantisation, on matrices under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tpshard.checkpoint import place_source
from tpshard.degrees import axes_of
from tpshard.manifest import Manifest
from tpshard.planning import Placed
from tpshard.quantised import Quantised, quantised
from tpshard.shards import Shards
from tpshard.source import Source

from .configs import raw_config
from .memory import Scratch
from .stores import Part, Store, rank_store, source_store


class DequantisingStore(Store):
    """The tensors of one holder, with the values of its quantised matrices in place of what stands for them.

    Args:
        held: what the holder stores of quantised matrices, and where.
        parts: of every tensor that the model knows; quantised matrices are in F32 there, at no place in a file.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        parts: Mapping[str, Part],
        quantised: Quantised,
        placed: Placed,
        rank: int,
        scratch: Scratch | None = None,
    ) -> None:
        from tpshard.quantisation.valuereader import BoxReader, extents_of

        super().__init__(paths, parts, scratch)
        try:
            self._matrices = quantised.matrices(placed, rank)
        except BaseException:
            self.close()
            raise
        self._boxes = BoxReader(self.files, extents_of(placed, rank))

    def _read(
        self, part: Part, start: int, stop: int, buffer: torch.Tensor, watch: Callable[[memoryview], None] | None
    ) -> torch.Tensor:
        matrix = self._matrices.get(part.name)
        if matrix is None:
            return super()._read(part, start, stop, buffer, watch)
        out = buffer.view(torch.float32).view(stop - start, *part.shape[1:])
        out.copy_(torch.from_numpy(matrix.rows(start, stop, self._boxes)))
        out += 0.0  # a zero code times a scale may be -0.0, and padding is compared with zero by its bits
        self.bytes_read += len(buffer)
        if watch is not None:
            watch(memoryview(buffer.numpy()))
        return out


@dataclass(frozen=True)
class Holders:
    """The source and the ranks as stores of the tensors that the model knows.

    Args:
        manifest: of the shards, with every quantised matrix in place of what stands for it.
        notes: what the report says of it.
    """

    shards: Shards
    source: Source
    manifest: Manifest
    whole: Quantised | None
    cut: Quantised | None
    notes: tuple[str, ...] = ()

    def source_store(self, scratch: Scratch) -> Store:
        """The source's tensors, each whole."""
        if self.whole is None:
            return source_store(self.source, scratch)
        placed = place_source(self.source)
        layout = replace(self.manifest, dims=_uncut(self.manifest), tp_size=1).layout
        parts = _parts(source_store(self.source), self.whole, layout.stored, 0)
        paths = [self.source.root / file.name for file in self.source.files]
        return DequantisingStore(paths, parts, self.whole, placed, 0, scratch)

    def rank_store(self, rank: int, scratch: Scratch) -> Store:
        """What one rank stores."""
        if self.cut is None:
            return rank_store(self.shards, rank, scratch)
        parts = _parts(rank_store(self.shards, rank), self.cut, self.manifest.layout.stored, rank)
        return DequantisingStore(self.shards.paths(), parts, self.cut, self.shards.placed, rank, scratch)
