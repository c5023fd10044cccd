"""A second config of the same architecture with other numbers, to tell which key a number follows.

Where 8 heads and 8 experts look alike, 16 and 24 do not. Every size in the config is changed where the model
still runs with it; sizes that only go together are changed in pairs.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[str, ...]

_NO_SIZE = re.compile(
    r"(_id|_ids|_token|_index|seed|labels|layers?|positions?|window|per_tok\w*|top_?k\w*|version|interval|"
    r"freq\w*|period|factor|chunk\w*|buckets?|distance|stride|kernel\w*|conv|blocks|group_limit|topk_group|n_group|"
    r"steps?|offset|image_size|patch_size|channels|max_\w+)$"
)
_MOST = 1 << 20
_FACTORS_SMALL = ((3, 2), (2, 1), (3, 1), (4, 1))  # no fewer: 8 heads over 2 must not become 4 over 4
_FACTORS_LARGE = ((3, 2), (3, 4), (5, 4), (1, 2), (7, 4))
SMALL = 16


def numbers_in(values: Mapping[str, Any], around: Path = ()) -> Iterator[tuple[Path, int]]:
    """Whole numbers above 0 of a config, with the keys that lead to them."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            if key.endswith("config"):
                yield from numbers_in(value, (*around, key))
        elif isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST:
            yield (*around, key), value


def is_size(path: Path, value: int) -> bool:
    """Whether a key may be the size or the count of something that tensors have."""
    return value > 1 and not _NO_SIZE.search(path[-1]) and not any("vision" in k or "audio" in k for k in path)


def varied(values: Mapping[str, Any], runs: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """``values`` with as many of its sizes changed as ``runs`` allows; one that runs."""
    sizes = [(path, value) for path, value in numbers_in(values) if is_size(path, value)]
    wanted: list[tuple[Path, list[int]]] = []
    seen: dict[int, int] = {}
    for path, value in sizes:
        wanted.append((path, _others(value, seen.get(value, 0))))
        seen[value] = seen.get(value, 0) + 1
    together = dict(copy.deepcopy(dict(values)))
    for path, choices in wanted:
        _put(together, path, choices[0])
    if runs(together):
        return together
    found = dict(copy.deepcopy(dict(values)))
    left: list[tuple[Path, list[int]]] = []
    for path, choices in wanted:
        tried = _with(found, runs, [[(path, choice)] for choice in choices[:2]])
        if tried is None:
            left.append((path, choices))
        else:
            found = tried
    pairs = list(itertools.combinations(left, 2))[:24]
    changed: set[Path] = set()
    for (a, _), (b, _) in pairs:
        if a in changed or b in changed:
            continue
        old_a, old_b = _get(found, a), _get(found, b)
        ways = [
            [(a, old_a * 2), (b, old_b * 2)],
            *([[(a, old_a * 2), (b, old_b // 2)]] if old_b % 2 == 0 and old_b > 2 else []),
        ]
        tried = _with(found, runs, ways)
        if tried is not None:
            found = tried
            changed |= {a, b}
    return found


def _with(values: Mapping[str, Any], runs: Callable[[Mapping[str, Any]], bool], ways: Any) -> dict[str, Any] | None:
    for changes in ways:
        tried = copy.deepcopy(dict(values))
        for path, value in changes:
            _put(tried, path, value)
        if runs(tried):
            return tried
    return None


def _others(value: int, turn: int) -> list[int]:
    ratios = _FACTORS_SMALL if value <= SMALL else _FACTORS_LARGE
    factors = [value * a // b for a, b in ratios if value * a % b == 0 and value * a // b > 1]
    factors = factors or [2 * value]  # an odd size, as a vocabulary's may be
    return factors[turn % len(factors) :] + factors[: turn % len(factors)]


def _put(values: dict[str, Any], path: Path, value: int) -> None:
    for key in path[:-1]:
        values = values[key]
    values[path[-1]] = value


def _get(values: Mapping[str, Any], path: Path) -> int:
    for key in path:
        values = values[key]
    return values  # type: ignore[return-value]
