"""What a ``config.json`` says: how two of them differ, keys that nobody reads, and the longest sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tpshard.errors import UsageError
from tpshard.listing import shown
from tpshard.manifest import Manifest
from tpshard.reports import Finding
from tpshard.strictjson import parse_config
from tpshard.table import BEHIND_PADDING

WITHOUT_BEARING = frozenset(
    (
        "_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "use_cache", "return_dict",
        "output_attentions", "output_hidden_states", "initializer_range", "torchscript", "_attn_implementation_autoset",
    )
)  # fmt: skip
"""Keys that change nothing of what the model computes, at any depth of the config."""

_ABSENT = "absent"
_OF_TOWERS = re.compile(r"vision|visual|image|audio|patch")  # tables of places in an image or a sound, not of tokens

def raw_config(root: Path) -> dict[str, Any]:
    """The values in the ``config.json`` of ``root``, as they stand there.

    Raises:
        DamagedError: it is no JSON object.
    """
    path = root / "config.json"
    return parse_config(path.read_bytes(), shown(path), "Restore it.")


def config_findings(level: str, source: Path, shards: Path, trust_remote_code: bool) -> list[Finding]:
    """One finding for every key with a bearing that the shards' config has otherwise than the source's.

    Both are read as transformers reads them, so that a default that is spelled out, or another spelling of a key
    (``torch_dtype``), is no difference.

    Raises:
        UnsupportedError: transformers takes one of them no longer.
    """
    from .skeleton import read_config

    if (source / "config.json").read_bytes() == (shards / "config.json").read_bytes():
        return []
    theirs, ours = (dict(_flat(read_config(root, trust_remote_code).to_dict())) for root in (source, shards))
    return [
        Finding(
            level, "config.json", key,
            f"config.json of the shards has {key} {_told(ours.get(key, _ABSENT))} where the source's has "
            f"{_told(theirs.get(key, _ABSENT))}; the shards would run as another model. Restore it from the source",
        )
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key, _ABSENT) != theirs.get(key, _ABSENT)
    ]  # fmt: skip


def _flat(values: Mapping[str, Any], around: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key, without those of no bearing."""
    for key, value in values.items():
        if key in WITHOUT_BEARING:
            continue
        if key == "architectures" and isinstance(value, list):
            value = sorted(map(str, value))
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{around}{key}.")
        else:
            yield f"{around}{key}", value


def _told(value: Any) -> str:
    return value if value is _ABSENT else f"{value!r:.80}"


def unknown_sizes(root: Path, config: Any) -> list[str]:
    """Keys of ``config.json`` with whole numbers that the class of ``config`` has no meaning for, as ``key 8``.

    transformers keeps such a key and reads it nowhere; the size that it was meant for then is a default.
    """
    try:
        known = set(config.attribute_map) | set(type(config)().to_dict())
    except Exception:  # a class that is made of arguments only does not say what it knows
        return []
    return [
        f"{key} {value}"
        for key, value in raw_config(root).items()
        if isinstance(value, int) and not isinstance(value, bool) and key not in known
    ]


def remote_name(root: Path) -> str:
    """The model class that ``auto_map`` of ``config.json`` names, "" for none."""
    named = raw_config(root).get("auto_map")
    if not isinstance(named, dict):
        return ""
    found = next((named[key] for key in ("AutoModelForCausalLM", "AutoModel") if key in named), "")
    return found if isinstance(found, str) else ""


def longest_sequence(root: Path, manifest: Manifest) -> int | None:
    """How many tokens the table of positions has room for; None where the model has no such table."""
    from .points import base_role

    rows = [
        tensor.shape[0]
        for tensor in manifest.tensors
        if tensor.shape
        and base_role(manifest.notes[tensor.name]) == "position"
        and "token_type" not in tensor.name
        and not _OF_TOWERS.search(tensor.name)
    ]
    if not rows or not any(note.role == "embed" for note in manifest.notes.values()):
        return None
    values = raw_config(root)
    text = values.get("text_config")
    values = text if isinstance(text, dict) else values
    limit = min(rows)
    for key in ("max_position_embeddings", "n_positions"):
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            limit = min(limit, value)
    if any(note.text == BEHIND_PADDING for note in manifest.notes.values()):
        padding = values.get("pad_token_id")
        limit -= (padding if isinstance(padding, int) else 1) + 1
    return limit


def require_positions(root: Path, manifest: Manifest, tokens: int) -> None:
    """Refuse more tokens than the model's table of positions has rows for.

    Raises:
        UsageError: names both numbers.
    """
    longest = longest_sequence(root, manifest)
    if longest is not None and tokens > longest:
        raise UsageError(f"--tokens {tokens} is more than the {longest} positions in the model's table; give fewer")
