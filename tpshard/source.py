"""A Hugging Face checkpoint on disk: its weights' headers, its index, its config, and what goes with it.

:func:`open_source` reads headers, the index and config.json, and lists everything else; no tensor
data is read. What contradicts itself is refused with both numbers: nothing is guessed or filled in.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpshard.config import ADAPTER_CONFIG, CONFIG
from tpshard.counting import counted
from tpshard.errors import DamagedError, StorageError, UnsupportedError, UsageError
from tpshard.header import TensorInfo, WeightsFile
from tpshard.listing import (
    GONE,
    Listing,
    current_directory_is_gone,
    is_weights,
    list_directory,
    rank_files,
    shown,
    storage_error,
)
from tpshard.opened import Stamp, open_weights, read_small, require_regular, require_unchanged
from tpshard.quantisation.separate import with_separate
from tpshard.strictjson import parse_config, parse_object
from tpshard.weightsindex import INDEXES, WeightsSet, adapter_weights, check_index, choose_weights, is_adapter_alone

_AGAIN = "Download or copy the file again."
_DIGITS = re.compile(r"([0-9]{1,18})")  # longer runs are cut, so that no conversion is slow
_MAX_CONFIG_BYTES = 16 << 20
_MAX_INDEX_BYTES = 256 << 20


@dataclass(frozen=True)
class SideFile:
    """A file that is carried byte for byte: config.json, the tokenizer, custom code, and so on."""

    path: str  # posix, relative to the checkpoint's root
    size: int


@dataclass(frozen=True)
class SourceIndex:
    """The index file of a checkpoint in several files, byte for byte."""

    name: str
    raw: bytes


@dataclass
class Source:
    """An opened checkpoint. Nothing is held open; :meth:`check_unchanged` says whether it is still the same."""

    root: Path
    label: str  # what the user gave: a hub id, or the path's last component
    config: dict[str, Any]
    config_raw: bytes
    files: tuple[WeightsFile, ...]  # in natural order of their names
    index: SourceIndex | None
    side_files: tuple[SideFile, ...]  # sorted by path; config.json included, weights and index not
    left_out: tuple[str, ...]  # "path (why)", sorted
    warnings: tuple[str, ...]
    stale: Mapping[int, frozenset[str]] = field(default_factory=dict)  # file index -> names that another file holds
    config_name: str = CONFIG  # of the file that ``config`` was read from
    _stamps: tuple[Stamp, ...] = ()  # of each file of `files`

    def tensors(self) -> Iterator[tuple[int, TensorInfo]]:
        """``(index into files, tensor)`` in file order; copies that the index does not point to are left out."""
        for number, weights in enumerate(self.files):
            stale = self.stale.get(number)
            for info in weights.tensors:
                if stale is None or info.name not in stale:
                    yield number, info

    def check_unchanged(self) -> None:
        """Raise :class:`DamagedError`, naming the file, if size, time or inode of a weights file differ by now."""
        require_unchanged(self.root, [weights.name for weights in self.files], self._stamps)


def natural_key(name: str) -> tuple[tuple[int | str, ...], str]:
    """A sort key under which runs of digits compare as numbers: ``layers.2`` before ``layers.10``."""
    parts = _DIGITS.split(name)
    return tuple(int(part) if at & 1 else part for at, part in enumerate(parts)), name


def open_source(
    path: str | os.PathLike[str], *, warn: Callable[[str], None] | None = None, adapter: bool = False
) -> Source:
    """Open the checkpoint in the directory ``path``, or, where no such path exists, under the hub id ``path``.

    Accepted are one safetensors file, an index of several, or ``pytorch_model.bin`` in one or indexed;
    safetensors come first. With ``adapter`` it is the PEFT adapter there that is opened: its own weights,
    and adapter_config.json as the config. Each warning goes to ``warn`` as well as into ``warnings``. Raises
    :class:`UsageError` (not a checkpoint's directory), :class:`UnsupportedError` (weights in another
    form), :class:`DamagedError` (incomplete, or contradicting itself) or :class:`StorageError`.
    """
    root, label = _root(path)
    for name in (CONFIG, ADAPTER_CONFIG, "tpshard.json", *INDEXES):
        require_regular(root / name)
    listing = list_directory(root)
    if "tpshard.json" in listing.sizes or "tpshard.json" in listing.broken:
        raise UsageError(
            f"{shown(root)} holds tpshard.json: it has been split already. Use `tpshard reshard` for another degree or "
            "`tpshard merge` to get the checkpoint back."
        )
    warnings: list[str] = []
    ranks = rank_files(listing.sizes)
    if ranks:
        raise DamagedError(
            f"{shown(root)} holds {counted(ranks, 'file')} of ranks (such as {ranks[0]}) and no tpshard.json, which "
            "says how they were cut. Copy tpshard.json from where they come from, or split again."
        )
    for name in listing.special:
        if "/" not in name and is_weights(name):
            raise DamagedError(f"{shown(root / name)} is no file: {listing.why_not(name)}. {_AGAIN}")
    if not adapter and is_adapter_alone(listing):
        raise UnsupportedError(_adapter_alone(root))
    config_name = ADAPTER_CONFIG if adapter else CONFIG
    chosen = adapter_weights(listing) if adapter else choose_weights(listing)
    config_raw, config = _config(listing, root, config_name)
    if not adapter:
        config = with_separate(config, root)
    index, weight_map, total_size = _index(listing, root, chosen)
    names = sorted(set(weight_map.values()) if weight_map is not None else chosen.files, key=natural_key)
    _check_present(listing, root, names, index)
    if index is not None and "model.safetensors" in listing.sizes and "model.safetensors" not in names:
        raise DamagedError(
            f"{shown(root)} holds model.safetensors as well as {index.name}, which does not name it: some loaders take "
            "the one, some the other. Remove the one that is not meant."
        )
    opened = [open_weights(root, name, chosen.format) for name in names]
    files = tuple(weights for weights, _ in opened)
    if not any(weights.tensors for weights in files):
        raise DamagedError(f"{shown(root)}: {', '.join(names)} holds no tensor at all. {_AGAIN}")
    stale: Mapping[int, frozenset[str]] = {}
    if index is not None and weight_map is not None:
        stale = check_index(files, weight_map, index.name, total_size, warnings)
    side_files, left_out = _rest(listing, set(names), index, warnings, adapter)
    if warn is not None:
        for text in warnings:
            warn(text)
    return Source(
        root=root,
        label=label,
        config=config,
        config_raw=config_raw,
        files=files,
        index=index,
        side_files=side_files,
        left_out=left_out,
        warnings=tuple(warnings),
        stale=stale,
        config_name=config_name,
        _stamps=tuple(stamp for _, stamp in opened),
    )


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a PEFT adapter and no model beside it.

    Raises:
        DamagedError, StorageError: it cannot be listed.
    """
    text = os.fspath(path)
    root = Path(text)
    return bool(text) and "\0" not in text and os.path.isdir(root) and is_adapter_alone(list_directory(root))


def _root(path: str | os.PathLike[str]) -> tuple[Path, str]:
    text = os.fspath(path)
    if not text or "\0" in text:
        raise UsageError(f"{text!r:.200} is not a path. Give a checkpoint's directory or a hub id.")
    root = Path(text)
    try:
        mode = os.stat(root).st_mode
    except (FileNotFoundError, NotADirectoryError):
        from tpshard import hub

        if not root.is_absolute() and current_directory_is_gone():
            raise StorageError(f"{shown(root)}: {GONE}") from None
        if os.path.lexists(root):
            raise DamagedError(
                f"{shown(root)} is a link to {shown(os.readlink(root))}, which does not exist. "
                "Give the directory itself."
            ) from None
        if hub.looks_like_id(text):
            return hub.resolve(text), text
        raise UsageError(
            f"There is no directory {shown(root)}. Give a checkpoint's directory or a hub id (org/name)."
        ) from None
    except OSError as error:
        raise storage_error(error, root, "looking at it") from None
    if not stat.S_ISDIR(mode):
        raise UsageError(
            f"{shown(root)} is a file. Give the directory that holds it, {shown(root.parent)}, with config.json "
            "beside it."
        )
    if not root.is_absolute() and current_directory_is_gone():
        raise StorageError(f"{shown(root)}: {GONE}")
    _not_a_cache(root)
    return root, shown(Path(os.path.abspath(root)).name or os.sep)


def _not_a_cache(root: Path) -> None:
    """A model's folder in the hub's cache holds its revisions below ``snapshots``, and nothing to read itself."""
    snapshots = root / "snapshots"
    if (root / "config.json").exists() or not snapshots.is_dir():
        return
    try:
        held = sorted(os.listdir(snapshots))
    except OSError as error:
        raise storage_error(error, snapshots, "listing it") from None
    if held:
        raise UsageError(
            f"{shown(root)} is a model's folder in a hub cache. Give one of its snapshots: "
            f"{', '.join(shown(snapshots / name) for name in held[:3])}{', ...' * (len(held) > 3)}."
        )
    raise DamagedError(f"{shown(root)} is a model's folder in a hub cache that holds no snapshot. Download the model.")


def _config(listing: Listing, root: Path, name: str) -> tuple[bytes, dict[str, Any]]:
    path = root / name
    if name not in listing.sizes:
        raise DamagedError(
            f"{shown(path)}: {listing.why_not(name)}. It says of which family and sizes the model is; copy it "
            "from where the weights came from."
        )
    raw = read_small(path, _MAX_CONFIG_BYTES)
    return raw, parse_config(raw, shown(path), _AGAIN)


def _adapter_alone(root: Path) -> str:
    """What is wrong with an adapter where a model is asked for, with the base model that it names itself."""
    try:
        config = parse_object(read_small(root / ADAPTER_CONFIG, _MAX_CONFIG_BYTES), ADAPTER_CONFIG, _AGAIN)
    except DamagedError:
        config = {}
    named = config.get("base_model_name_or_path")
    kind = config.get("peft_type")
    told = f", a {kind} of {named!r:.200}" if isinstance(named, str) and named and isinstance(kind, str) else ""
    return (
        f"{shown(root)} holds a PEFT adapter alone ({ADAPTER_CONFIG}{told}) and not the model that it adapts. How it "
        "is cut follows from its base model: give that to `tpshard split` with --base BASE (a directory, or a hub id)."
    )


def _index(
    listing: Listing, root: Path, chosen: WeightsSet
) -> tuple[SourceIndex | None, dict[str, str] | None, object]:
    if chosen.index_name is None:
        return None, None, None
    path = root / chosen.index_name
    if chosen.index_name in listing.broken:
        raise DamagedError(f"{shown(path)}: {listing.broken[chosen.index_name]}. {_AGAIN}")
    raw = read_small(path, _MAX_INDEX_BYTES)
    parsed = parse_object(raw, shown(path), _AGAIN)
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedError(f"{shown(path)} has no weight_map from tensor names to files. {_AGAIN}")
    for tensor, name in weight_map.items():
        if type(name) is not str or not _inside(name):
            raise DamagedError(
                f"{shown(path)} maps {tensor!r:.200} to {name!r:.200}, which is not the name of a file in its own "
                f"directory. {_AGAIN}"
            )
    metadata = parsed.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return SourceIndex(chosen.index_name, raw), weight_map, total_size


def _inside(name: str) -> bool:
    if "\\" in name or "\0" in name or len(name) > 1024:
        return False
    return not any(part in ("", ".", "..") for part in name.split("/"))


def _check_present(listing: Listing, root: Path, names: list[str], index: SourceIndex | None) -> None:
    missing = [name for name in names if name not in listing.sizes]
    if missing:
        listed = "; ".join(f"{name} ({listing.why_not(name)})" for name in missing[:5])
        more = f"; and {len(missing) - 5:,} more" if len(missing) > 5 else ""
        by = f" that {index.name} names" if index is not None else ""
        raise DamagedError(
            f"{shown(root)}: of {len(names):,} weights files{by}, {len(missing):,} cannot be read: {listed}{more}. "
            "Download or copy the missing files."
        )


def _rest(
    listing: Listing, used: set[str], index: SourceIndex | None, warnings: list[str], adapter: bool
) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    """Everything but the weights in use: what is carried, and what is left out with the reason."""
    out = [f"{path} ({reason})" for path, reason in listing.left_out]
    side: list[SideFile] = []
    for path, size in listing.sizes.items():
        if path in used or (index is not None and path == index.name):
            continue
        if is_weights(path):
            out.append(f"{path} (weights that are not in use)")
            if re.search(r"-[0-9]{5}-of-[0-9]{5}\.safetensors$", path) and index is not None and "/" not in path:
                warnings.append(f"{path} is left out: {index.name} names no tensor in it.")
        elif path == ADAPTER_CONFIG and not adapter:
            out.append(f"{path} (an adapter is not part of the model)")
            warnings.append(
                "adapter_config.json is left out: the adapter beside the model is neither split nor merged into it."
            )
        else:
            side.append(SideFile(path, size))
    for path, reason in listing.broken.items():
        if not is_weights(path):
            raise DamagedError(f"{shown(listing.root / path)}: {reason}. Restore the file or remove the link.")
        out.append(f"{path} ({reason})")
    return tuple(sorted(side, key=lambda file: file.path)), tuple(sorted(out))
