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
from tpshard.errors import DamagedError
from tpshard.layout import Cut, cut_dims
from tpshard.listing import shown
from tpshard.manifest import Manifest
from tpshard.matching import Logical
from tpshard.planning import Placed
from tpshard.quantisation.separate import with_separate
from tpshard.quantised import DTYPE, Quantised, quantised
from tpshard.shards import Shards
from tpshard.source import Source
from tpshard.valued import values_of_source

from .configs import raw_config
from .memory import Scratch
from .stores import DTYPES, Part, Store, rank_store, source_store

OF_VALUES = frozenset({"quantization_config", "compression_config", "dtype", "torch_dtype"})


class DequantisingStore(Store):
    """The tensors of one holder, with the values of its quantised matrices in place of what stands for them.

    Args:
        parts: of every tensor that the model knows; quantised matrices are at no place in a file, in the dtype that
            their values are rounded to.
        quantised: what stands for the matrices.
        placed: where the holder's tensors lie.
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
        self._boxes = BoxReader(self.files.read, extents_of(placed, rank))

    def _read(
        self, part: Part, start: int, stop: int, buffer: torch.Tensor, watch: Callable[[memoryview], None] | None
    ) -> torch.Tensor:
        matrix = self._matrices.get(part.name)
        if matrix is None:
            return super()._read(part, start, stop, buffer, watch)
        found = matrix.rows(start, stop, self._boxes, part.dtype)
        if part.dtype == DTYPE:
            found += 0.0  # a zero code times a scale may be -0.0, and padding is compared with zero by its bits
        stored = found.reshape(-1).view("u1")
        buffer.copy_(torch.from_numpy(stored))
        self.bytes_read += len(buffer)
        if watch is not None:
            watch(memoryview(buffer.numpy()))
        return buffer.view(DTYPES[part.dtype]).view(stop - start, *part.shape[1:])


@dataclass(frozen=True)
class Holders:
    """The source and the ranks as stores of the tensors that the model knows.

    Args:
        manifest: of the shards, with every quantised matrix in place of what stands for it.
        notes: what the report says of it.
        dtype: what the source's values are rounded to.
        config_keys: keys that the config of values has otherwise than the quantised one.
    """

    shards: Shards
    source: Source
    manifest: Manifest
    whole: Quantised | None
    cut: Quantised | None
    notes: tuple[str, ...] = ()
    dtype: str = DTYPE
    config_keys: frozenset[str] = frozenset()

    def source_store(self, scratch: Scratch) -> Store:
        """The source's tensors, each whole."""
        store = source_store(self.source, scratch)
        if self.whole is None:
            return store
        cuts = {name: cut_dims(dims, 1) for name, dims in self.whole.dims.items()}
        paths = [self.source.root / file.name for file in self.source.files]
        parts = _with_matrices(store.parts, self.whole, cuts, 0, self.dtype)
        return DequantisingStore(paths, parts, self.whole, place_source(self.source), 0, scratch)

    def rank_store(self, rank: int, scratch: Scratch) -> Store:
        """What one rank stores."""
        store = rank_store(self.shards, rank, scratch)
        if self.cut is None:
            return store
        cuts = {name: cut_dims(dims, self.manifest.tp_size) for name, dims in self.cut.dims.items()}
        parts = _with_matrices(store.parts, self.cut, cuts, rank)
        return DequantisingStore(self.shards.paths(), parts, self.cut, self.shards.placed, rank, scratch)


def holders(shards: Shards, source: Source) -> Holders:
    """Source and ranks, with quantised matrices as their values where the source's config declares any.

    Raises:
        UnsupportedError: no formula is known for a format.
        DamagedError: the configs of source and shards do not declare the same matrices.
    """
    manifest = shards.manifest
    aliases, unknown = manifest.aliases, any(note.role == "unknown" for note in manifest.notes.values())
    tensors = [Logical(info.name, info.dtype, info.shape) for _, info in source.tensors()]
    whole = quantised(source.config, tensors, aliases=aliases, copy_unknown=unknown)
    config = with_separate(raw_config(shards.root), shards.root)
    axes = axes_of(manifest.dims)
    cut = quantised(config, manifest.tensors, aliases=aliases, axes=axes, copy_unknown=unknown)
    if whole is None or cut is None or whole.packed.keys() != cut.packed.keys():
        if whole is None and cut is None:
            return Holders(shards, source, manifest, None, None)
        if whole is not None and cut is None and values_of_source(source, manifest) is not None:
            held = {tensor.name: tensor.dtype for tensor in manifest.tensors}
            (dtype,) = {held[name] for name in whole.packed}
            told = f"the original's {len(whole.packed)} quantised matrices were run as their values in {dtype}"
            return Holders(shards, source, manifest, whole, None, (told,), dtype, OF_VALUES)
        raise DamagedError(
            f"{shown(shards.root / 'config.json')} does not declare the quantised matrices that the source's does; "
            "restore it from the source"
        )
    kept = {tensor.name for tensor in cut.tensors} - cut.packed.keys()
    logical = replace(
        manifest,
        tensors=cut.tensors,
        dims={name: dims for name, dims in manifest.dims.items() if name in kept} | dict(cut.dims),
        notes={name: note for name, note in manifest.notes.items() if name in kept} | dict(cut.notes),
    )
    names = sorted({packed.format.name for packed in cut.packed.values()})
    note = f"{len(cut.packed)} matrices ({', '.join(names)}) were run as the values of what each rank stores of them"
    return Holders(shards, source, logical, whole, cut, (note,))


def _with_matrices(
    stored: Mapping[str, Part], found: Quantised, cuts: Mapping[str, Cut], rank: int, dtype: str = DTYPE
) -> dict[str, Part]:
    """The parts of the tensors that the model knows."""
    parts = {tensor.name: stored[tensor.name] for tensor in found.tensors if tensor.name in stored}
    for name, cut in cuts.items():
        parts.pop(name, None)  # values in the matrix's own shape have its name
        if cut.shapes[rank] is not None:
            parts[name] = Part(name, dtype, -1, 0, cut, rank)
    return parts
