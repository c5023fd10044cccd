"""Which weights of a directory are the checkpoint, and whether index and files agree."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpshard.config import ADAPTER_CONFIG, CONFIG
from tpshard.errors import DamagedError, UnsupportedError, UsageError
from tpshard.header import WeightsFile
from tpshard.listing import Listing, is_weights, shown

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_ADAPTERS = {"adapter_model.safetensors": "safetensors", "adapter_model.bin": "torch"}
_PIECE = re.compile(r".*[-_.](0*[0-9]+)-of-(0*[0-9]+).*")
_NOT_THE_MODEL = re.compile(r"(adapter|optimizer|scheduler|training|rng_state|consolidated).*")


class WeightsSet(NamedTuple):
    """The weights to read: an index (then ``files`` is empty), or the one file."""

    format: str  # "safetensors" or "torch"
    index_name: str | None
    files: tuple[str, ...]


def choose_weights(listing: Listing) -> WeightsSet:
    """The weights that make up the checkpoint in ``listing``, safetensors before ``pytorch_model.bin``.

    :class:`DamagedError` where there are none, or several that nothing puts in order;
    :class:`UnsupportedError` where there are only other formats.
    """
    here = sorted(path for path in (*listing.sizes, *listing.broken) if "/" not in path)
    chosen = _safetensors(listing, here) or _torch(listing, here)
    if chosen is not None:
        return chosen
    others = [path for path in here if is_weights(path)]
    where = shown(listing.root)
    if others:
        raise UnsupportedError(
            f"{where} holds weights only as {', '.join(others[:5])}, which are not read. Save the model with "
            "transformers' save_pretrained, which writes safetensors, and give that directory."
        )
    if not here and not listing.sizes:
        raise DamagedError(f"{where} is empty. Give a directory with config.json and model.safetensors.")
    raise DamagedError(
        f"{where} holds no weights: neither a .safetensors file nor pytorch_model.bin. Download them, or give the "
        "directory that holds them."
    )


def is_adapter_alone(listing: Listing) -> bool:
    """Whether a directory holds a PEFT adapter and no model beside it."""
    if ADAPTER_CONFIG not in listing.sizes:
        return False
    if CONFIG not in listing.sizes:
        return True
    here = [path for path in (*listing.sizes, *listing.broken) if "/" not in path]
    return not any(is_weights(path) and not _NOT_THE_MODEL.match(path) for path in here)


def adapter_weights(listing: Listing) -> WeightsSet:
    """The weights of the PEFT adapter in ``listing``, safetensors before a pickle.

    :class:`UsageError` where there is no adapter, :class:`DamagedError` where it has no weights.
    """
    where = shown(listing.root)
    if ADAPTER_CONFIG not in listing.sizes and ADAPTER_CONFIG not in listing.broken:
        raise UsageError(
            f"{where} holds no PEFT adapter (no {ADAPTER_CONFIG}): give an adapter's directory, or leave --base away "
            "where it is a model"
        )
    for name, form in _ADAPTERS.items():
        if name in listing.sizes or name in listing.broken:
            return WeightsSet(form, None, (name,))
    raise DamagedError(
        f"{where} holds {ADAPTER_CONFIG} and no weights beside it: neither {' nor '.join(_ADAPTERS)}. Download them."
    )


def _safetensors(listing: Listing, here: Sequence[str]) -> WeightsSet | None:
    where = shown(listing.root)
    indexes = [path for path in here if path.endswith(".safetensors.index.json")]
    singles = [path for path in here if path.endswith(".safetensors") and not _NOT_THE_MODEL.match(path)]
    if indexes:
        if len(indexes) > 1 and "model.safetensors.index.json" not in indexes:
            raise DamagedError(f"{where} holds several indexes: {', '.join(indexes)}. Keep the one that is meant.")
        index = "model.safetensors.index.json" if "model.safetensors.index.json" in indexes else indexes[0]
        return WeightsSet("safetensors", index, ())
    if "model.safetensors" in singles:
        return WeightsSet("safetensors", None, ("model.safetensors",))
    if len(singles) > 1:
        raise DamagedError(
            f"{where} holds {len(singles)} safetensors files ({', '.join(singles[:5])}{', ...' * (len(singles) > 5)}) "
            "and no index that says which tensor is read from which. Download model.safetensors.index.json too."
        )
    if singles:
        piece = _PIECE.fullmatch(singles[0])
        if piece is not None and piece[2].strip("0") != "1":
            raise DamagedError(
                f"{where} holds only {singles[0]}, one of {int(piece[2][:18]):,} pieces, and no index. Download the "
                "other pieces and model.safetensors.index.json."
            )
        return WeightsSet("safetensors", None, (singles[0],))
    return None


def _torch(listing: Listing, here: Sequence[str]) -> WeightsSet | None:
    if "pytorch_model.bin.index.json" in here:
        return WeightsSet("torch", "pytorch_model.bin.index.json", ())
    if "pytorch_model.bin" in here:
        return WeightsSet("torch", None, ("pytorch_model.bin",))
    pieces = [path for path in here if re.fullmatch(r"pytorch_model-.*\.bin", path)]
    if pieces:
        raise DamagedError(
            f"{shown(listing.root)} holds {len(pieces)} pieces ({pieces[0]}, ...) and no pytorch_model.bin.index.json "
            "that says which tensor is read from which. Download it too."
        )
    return None


def check_index(
    files: Sequence[WeightsFile],
    weight_map: Mapping[str, str],
    index: str,
    total_size: object,
    warnings: list[str],
) -> dict[int, frozenset[str]]:
    """Check every tensor of the index against the files, and the other way round.

    Returns, per index into ``files``, the names that the index maps to another file, each with a
    warning. A tensor that is not where the index says, or that the index does not know, raises
    :class:`DamagedError`. A wrong ``total_size`` is a warning only: published indexes have them.
    """
    holders = {weights.name: {info.name for info in weights.tensors} | set(weights.aliases) for weights in files}
    for tensor, name in weight_map.items():
        if tensor not in holders[name]:
            elsewhere = [other for other, held in holders.items() if tensor in held]
            hint = f"; {', '.join(elsewhere)} does" if elsewhere else "; no other file does either"
            raise DamagedError(
                f"{index} says that {tensor!r:.200} is in {name}, which does not hold it{hint}. Index and files are of "
                "different versions: download them again."
            )
    stale: dict[int, frozenset[str]] = {}
    total = shared = 0
    for number, weights in enumerate(files):
        foreign: set[str] = set()
        for info in weights.tensors:
            if not _is_mapped(info.name, weights, weight_map, index, warnings):
                foreign.add(info.name)
            else:
                total += info.nbytes
        sizes = {info.name: info.nbytes for info in weights.tensors}
        for alias, target in weights.aliases.items():
            if not _is_mapped(alias, weights, weight_map, index, warnings):
                foreign.add(alias)
                continue
            shared += sizes[target]
            if target in foreign:
                raise UnsupportedError(
                    f"{weights.name}: {alias!r:.200} shares its bytes with {target!r:.200}, which {index} maps to "
                    f"{weight_map[target]}. Load the checkpoint with transformers and save it again."
                )
        if foreign:
            stale[number] = frozenset(foreign)
    if isinstance(total_size, (int, float)) and total_size not in (total, total + shared):
        warnings.append(f"{index} gives a total_size of {total_size:,} bytes; the tensors have {total:,}.")
    return stale


def _is_mapped(
    tensor: str, weights: WeightsFile, weight_map: Mapping[str, str], index: str, warnings: list[str]
) -> bool:
    mapped = weight_map.get(tensor)
    if mapped is None:
        raise DamagedError(
            f"{weights.name} holds {tensor!r:.200}, which {index} does not name. Index and files are of different "
            "versions: download them again."
        )
    if mapped == weights.name:
        return True
    warnings.append(
        f"{tensor!r:.200} is in {weights.name} as well as in {mapped}; {index} names {mapped}, so the copy in "
        f"{weights.name} is left out."
    )
    return False
