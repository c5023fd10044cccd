"""A quantised checkpoint as the one that its values make: a source whose tensors are computed while they are read.

For those who need a degree that groups forbid, or an engine that does not know the method. Plan, mover, digests and
manifest see files of ordinary tensors; a range of bytes of one is computed from the bytes of its members, by the
formulas in :mod:`tpshard.quantisation.values`, and rounded once to the nearest (ties to even). Nothing of a matrix's
size is held. The config loses its quantisation, scales of activations and of the KV cache are left out, and `merge`
gives the checkpoint in the dtype asked for, not the quantised one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, checkpoint_of, place_source
from .degrees import axes_of
from .errors import DamagedError, UnsupportedError, UsageError
from .header import DTYPE_BITS, TensorInfo, WeightsFile, build_header
from .manifest import SideFile as Carried
from .matching import Logical
from .openfiles import OpenFiles
from .options import DEFAULTS, Options
from .output import Job
from .quantised import quantised
from .rehash import differing_digests
from .rejoined import rejoined
from .shards import Shards
from .source import SourceIndex

if TYPE_CHECKING:
    from .valuefiles import Holder

DTYPES: Mapping[str, tuple[str, str]] = {
    "bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16"), "fp32": ("F32", "float32"),
}  # fmt: skip
"""Words of the command line: the dtype in safetensors, and as config.json names it."""

TILE = 8 << 20  # bytes: values of a few outputs are strewn over all of GPTQ's and AWQ's rows, which are inputs
_CONFIGS = ("quantization_config", "compression_config")
_ABOUT = frozenset({"quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json"})


@dataclass(frozen=True)
class Dequantised:
    """A checkpoint of values.

    Args:
        checkpoint: its source has files that are not on disk; their names and stamps are the quantised ones'.
        opened: makes the files of the quantised source such that reading gives bytes of the values.
        small: files that are not the source's: config.json.
    """

    checkpoint: Checkpoint
    opened: Callable[[Sequence[Path], Sequence[bool]], OpenFiles]
    small: Mapping[str, bytes]

    def with_config(self, sides: Sequence[Carried]) -> tuple[Carried, ...]:
        """The side files that were carried and those of ``small``, by path."""
        own = [Carried(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in self.small.items()]
        return tuple(sorted([*sides, *own], key=lambda side: side.path))

    def files(self) -> tuple[list[WeightsFile], tuple[str, bytes] | None]:
        """The weights files of a checkpoint of values, and their index."""
        index = self.checkpoint.source.index
        return list(self.checkpoint.source.files), None if index is None else (index.name, index.raw)

    def job(self, job: Job) -> Job:
        """The job that reads these values instead of the files of its sources, and carries no other config."""
        source = self.checkpoint.source
        return replace(
            job, root=source.root, files=[source.root / file.name for file in source.files],
            sides={side.path: side.size for side in source.side_files},
            small={**{name: len(data) for name, data in self.small.items()}, **job.small}, expected={},
            opened=self.opened, tile_bytes=TILE,
        )  # fmt: skip


def dequantised_shards(
    shards: Shards, word: str, options: Options = DEFAULTS, notes: Sequence[str] = ()
) -> Dequantised:
    """The checkpoint that the values of a quantised one make, which lies cut into ranks: the same as of the uncut one.

    The digests of what the ranks hold are checked first, since what is computed has none that was promised.

    Args:
        notes: warnings to begin with.

    Raises:
        UsageError, UnsupportedError, DamagedError: as :func:`dequantised`, or a rank's tensor is not what was written.
        StorageError: reading failed.
    """
    from .valuefiles import RanksHolder

    manifest = shards.manifest
    unknown = any(note.role == "unknown" for note in manifest.notes.values())
    whole = checkpoint_of(rejoined(shards), copy_unknown=unknown)
    whole = replace(whole, warnings=(*notes, *whole.warnings))
    values = dequantised(whole, word, partial(RanksHolder, shards.paths(), shards.placed))
    for finding in differing_digests(shards, options):
        raise DamagedError(f"{finding.message}; the shards are damaged: copy them again, or split again")
    return values


def dequantised(checkpoint: Checkpoint, word: str, holder: Callable[[], Holder] | None = None) -> Dequantised:
    """The checkpoint that the values of a quantised one make, in the dtype of the ``word``.

    Args:
        holder: makes who holds what is stored; its own files where none is given.

    Raises:
        UsageError: there is no such dtype.
        UnsupportedError: nothing is quantised, no formula is known, or the files are not safetensors.
        DamagedError: the tensors do not fit each other.
    """
    if word not in DTYPES:
        raise UsageError(f"--dequantize {word}: choose {', '.join(DTYPES)}")
    dtype, named = DTYPES[word]
    source = checkpoint.source
    found = quantised(
        source.config, checkpoint.tensors, aliases=checkpoint.aliases(), copy_unknown=bool(checkpoint.matched.unknown)
    )
    if found is None:
        raise UnsupportedError(f"{source.label} holds no quantised matrix; leave --dequantize away")
    if any(file.format != "safetensors" for file in source.files):
        raise UnsupportedError(
            f"{source.label} is stored in {source.files[0].name}; --dequantize reads safetensors: save it so first"
        )
    matrices = found.matrices(checkpoint.placed, 0)
    first_of = {next(iter(packed.members)): name for name, packed in found.packed.items()}
    logical = {tensor.name: tensor for tensor in found.tensors}
    files, dropped = [], []
    for number, file in enumerate(source.files):
        kept: list[Logical] = []
        for info in file.tensors:
            if info.name in source.stale.get(number, ()):
                continue
            if info.name in first_of:
                kept.append(logical[first_of[info.name]]._replace(dtype=dtype))
            elif info.name in logical and info.name not in matrices:
                kept.append(logical[info.name])
            elif not any(info.name in packed.members for packed in found.packed.values()):
                dropped.append(info.name)
        files.append(_file(file, kept))
    config = _config(source.config, named)
    raw = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    about = [side for side in source.side_files if side.path in _ABOUT]
    names = ", ".join(sorted({packed.format.name for packed in found.packed.values()}))
    told = (
        f"{source.config_name}: quantization_config ({len(matrices)} matrices, {names}, are stored as their values, "
        f"rounded to {dtype})"
    )
    left_out = [
        *source.left_out, told, *(f"{side.path} (it tells of the quantisation)" for side in about),
        *([f"scales of the KV cache ({', '.join(dropped[:3])}{', ...' * (len(dropped) > 3)})"] if dropped else []),
    ]  # fmt: skip
    view = replace(
        source, files=tuple(files), config=config, config_raw=raw, stale={}, index=_index(source.index, files),
        left_out=tuple(sorted(left_out)),
        side_files=tuple(s for s in source.side_files if s not in about and s.path != source.config_name),
    )  # fmt: skip
    placed = place_source(view)
    warnings = (*checkpoint.warnings, f"{told}; merge will give these, not the quantised checkpoint")
    tensors = tuple(placed.layout.tensors.values())
    values = Checkpoint(
        view, checkpoint.family, tensors, found.matched, axes_of(found.matched.dims), placed, warnings
    )
    from .valuefiles import ValueFiles, WholeHolder

    holder = holder or partial(WholeHolder, [source.root / file.name for file in source.files], checkpoint.placed)
    make = partial(ValueFiles, files, matrices, dtype, holder)
    return Dequantised(values, make, {source.config_name: raw})


def _file(file: WeightsFile, tensors: Sequence[Logical]) -> WeightsFile:
    """A file of the same name with these tensors in this order."""
    kept = {key: text for key, text in file.metadata.items() if key == "format"}  # torchao describes its tensors here
    header = build_header(tensors, kept or None)
    infos, at = [], len(header)
    for tensor in tensors:
        nbytes = prod(tensor.shape) * DTYPE_BITS[tensor.dtype] // 8
        infos.append(TensorInfo(tensor.name, tensor.dtype, tensor.shape, at, nbytes))
        at += nbytes
    return WeightsFile(file.name, at, "safetensors", tuple(infos), kept, {}, ((0, header),))


def _config(values: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config without its quantisation, in the dtype."""
    config = {key: value for key, value in values.items() if key not in _CONFIGS}
    if isinstance(config.get("text_config"), Mapping):
        inner = config["text_config"]
        config["text_config"] = {key: value for key, value in inner.items() if key not in _CONFIGS}
    spelling = next((key for key in ("dtype", "torch_dtype") if key in config), "torch_dtype")
    return {**config, spelling: dtype}


def _index(index: SourceIndex | None, files: Sequence[WeightsFile]) -> SourceIndex | None:
    if index is None:
        return None
    weight_map = {info.name: file.name for file in files for info in file.tensors}
    total = sum(info.nbytes for file in files for info in file.tensors)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    return SourceIndex(index.name, text.encode() + b"\n")
