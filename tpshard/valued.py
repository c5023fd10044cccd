"""Whether shards hold the values of a checkpoint that is quantised, and these to hold them against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .checkpoint import Checkpoint, checkpoint_of
from .manifest import Manifest
from .quantisation.methods import quantisation_of
from .shards import Shards
from .source import Source

if TYPE_CHECKING:
    from .dequantise import Dequantised


def values_of_source(source: Source, manifest: Manifest) -> Dequantised | None:
    """The values of a quantised checkpoint in the dtype in which shards hold them.

    None where it is not quantised, or the shards hold its own tensors.

    Raises:
        UnsupportedError, DamagedError: the source cannot be read for what it is.
    """
    found = _asked(source, manifest)
    if found is None:
        return None
    from .dequantise import dequantised

    return dequantised(*found)


def values_of_shards(shards: Shards, manifest: Manifest) -> Dequantised | None:
    """The same of a quantised checkpoint that lies in shards."""
    names = {tensor.name for tensor in manifest.tensors}
    if manifest.is_adapter or {tensor.name for tensor in shards.manifest.tensors} == names:
        return None
    from .rejoined import rejoined

    found = _asked(rejoined(shards), manifest)
    if found is None:
        return None
    from .dequantise import dequantised_shards

    return dequantised_shards(shards, found[1])


def _asked(source: Source, manifest: Manifest) -> tuple[Checkpoint, str] | None:
    """The checkpoint and the word for the dtype of its values that the shards hold."""
    if manifest.is_adapter or quantisation_of(source.config) is None:
        return None
    mine = {tensor.name: tensor.dtype for tensor in manifest.tensors}
    if {info.name for _, info in source.tensors()} == mine.keys():
        return None
    from .dequantise import DTYPES
    from .quantised import quantised

    checkpoint = checkpoint_of(source, copy_unknown=any(note.role == "unknown" for note in manifest.notes.values()))
    found = quantised(source.config, checkpoint.tensors, aliases=checkpoint.aliases())
    if found is None or any(name not in mine for name in found.packed):
        return None
    dtypes = {mine[name] for name in found.packed}
    word = next((word for word, (dtype, _) in DTYPES.items() if {dtype} == dtypes), None)
    return None if word is None else (checkpoint, word)
