"""What completes a directory of shards: headers that name the weights that have passed, and the manifest."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from . import manifest as manifests
from .digest import Digests
from .execute import Outcome
from .manifest import Manifest, RankFile
from .output import Ending
from .place import Headed, sealed
from .planning import Plan
from .reports import Conversion


def native_small(plan: Plan, left_out: Sequence[str]) -> dict[str, int]:
    """The manifest, as large as it may get: headers of the source and the digests make up its size."""
    beside = sum(8 + 2 * len(text.encode()) for text in left_out)
    return {manifests.NAME: 65536 + 256 * len(plan.writes) + 256 * len(plan.reads) + beside}


def native_ending(
    plan: Plan, headed: Headed, outcome: Outcome, report: Conversion, manifest: Manifest,
    small: Mapping[str, bytes] | None = None,
) -> Ending:  # fmt: skip
    """Headers that name the weights that have passed, small files that are not the source's, and the manifest."""
    report.content = manifest.content
    frames = (
        (file.name, ((0, sealed(header, manifest.content)),))
        for file, header in zip(plan.target.files, headed.headers, strict=True)
    )
    return Ending(frames, {**(small or {}), manifests.NAME: manifests.dumped(manifest)})


def digested_files(plan: Plan, outcome: Outcome, algorithm: str) -> tuple[RankFile, ...]:
    """The ranks' files with the digest of every tensor in them, in stored order."""
    numbers = [array("L") for _ in plan.target.files]
    for number, extent in enumerate(plan.writes):
        numbers[extent.file].append(number)  # writes of a file come in the order in which it holds them
    return tuple(
        RankFile(file.name, file.rank, file.size, digest_row(map(outcome.write_digests.__getitem__, found), algorithm))
        for file, found in zip(plan.target.files, numbers, strict=True)
    )


def digest_row(digests: Iterable[str | None], algorithm: str) -> Sequence[str]:
    """Digests in little space; none where none were taken."""
    return Digests.of((digest or "" for digest in digests), algorithm) if algorithm else ()
