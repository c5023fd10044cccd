"""Hashes what ranks' files hold anew, and compares it with the digests that the manifest promises."""

from __future__ import annotations

from .execute import hash_extents
from .options import DEFAULTS, Options, move_settings
from .reports import Finding
from .shards import Shards


def differing_digests(shards: Shards, options: Options = DEFAULTS) -> list[Finding]:
    """Stored tensors that are not what was written; none where the shards were written without digests.

    Raises:
        DamagedError: a file ends early.
        StorageError: reading failed.
    """
    manifest, expected = shards.manifest, shards.expected()
    if not expected:
        return []
    extents = [extent for row in shards.placed.extents for extent in row if extent is not None]
    threads, tile = move_settings(options.threads, options.max_memory)
    with options.running(sum(extent.nbytes for extent in extents)) as progress:
        digests = hash_extents(
            extents, shards.paths(), threads=threads, tile_bytes=tile, algorithm=manifest.algorithm, progress=progress
        )
    out = []
    for number, (extent, digest) in enumerate(zip(extents, digests, strict=True)):
        if digest != expected[number]:
            file = manifest.files[extent.file].name
            told = f"{file}: {extent.tensor} has {manifest.algorithm} {digest} where {expected[number]} was written"
            out.append(Finding("digest", file, extent.tensor, told))
    return out
