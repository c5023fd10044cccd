"""``tpshard.toml``: what is verified and how large an error may be; and the gates that apply without one.

```toml
[verify]
levels = ["standard"]        # or single levels: "structure", "digest", "bytes", "plan", "twin", ...
compute = "fp64"             # fp64, fp32 or native
mode = "auto"                # auto, zero-pad or local
tokens = 8
min_coverage = 1.0           # part of the parameters that must be exercised, 0 to 1; without it what the original
                             # itself exercises

[gates.fp64]
default = 1e-10              # relative L2 error of a point, teacher forced
fp32_inside = 1e-7           # where the model itself computes in float32 inside
logits = 1e-6                # free running, end to end

[gates.fp64.blocks]          # by block or point, with * and ?; the first that matches counts
"model.layers.*.mlp" = 1e-9
```

A key that is not one of these is refused. Sources of the default gates: the fault-free floor is 3e-15 in
fp64 and 3e-7 in fp32 over 173 architectures, and a flipped lowest bit of one bfloat16 weight is 1e-7 and more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from .errors import StorageError, UsageError
from .listing import shown

LEVELS = ("structure", "digest", "bytes", "plan", "twin", "forward", "backward", "runtime")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "quick": ("structure", "plan"),
    "standard": ("structure", "digest", "bytes", "plan", "forward"),
    "full": LEVELS,
}
COMPUTE = ("fp64", "fp32", "native")
MODES = ("auto", "zero-pad", "local")
_LARGEST = 1 << 20  # bytes of a tpshard.toml


@dataclass(frozen=True)
class Gate:
    """The gates of one compute dtype; None: calibrated on the original itself, with re-associated sums."""

    default: float | None
    fp32_inside: float | None
    logits: float | None
    blocks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Gates:
    """Gates by compute dtype."""

    fp64: Gate = Gate(1e-10, 1e-7, 1e-6)
    fp32: Gate = Gate(3e-6, 3e-6, 1e-4)
    native: Gate = Gate(None, None, None)

    def of(self, compute: str, *names: str, fp32_inside: bool = False) -> float | None:
        """The gate of a point, by its names (the point's and its block's); None where it is to be calibrated.

        An override whose pattern matches any of the names counts before the default.
        """
        override = self.override(compute, *names)
        if override is not None:
            return override
        gate: Gate = getattr(self, compute)
        return gate.fp32_inside if fp32_inside else gate.default

    def override(self, compute: str, *names: str) -> float | None:
        """The gate of the first pattern that matches any of the names, None where none does."""
        gate: Gate = getattr(self, compute)
        for pattern, value in gate.blocks:
            if any(fnmatchcase(name, pattern) for name in names):
                return value
        return None

    def logits(self, compute: str) -> float | None:
        """The gate of the logits, free running."""
        gate: Gate = getattr(self, compute)
        return gate.logits

    def as_json(self, compute: str) -> dict[str, Any]:
        """The gates of one compute dtype, for reports."""
        gate = asdict(getattr(self, compute))
        return {**gate, "blocks": dict(gate["blocks"])}


@dataclass(frozen=True)
class Settings:
    """What is verified and how, apart from the directories."""

    levels: tuple[str, ...] | None = None  # None: all that can run
    compute: str = "fp64"
    mode: str = "auto"
    tokens: int = 8
    min_coverage: float | None = None  # None: what the original itself reaches
    gates: Gates = field(default_factory=Gates)


def expanded(words: Sequence[str]) -> tuple[str, ...]:
    """Levels and groups of levels as levels, each once, in their usual order.

    Raises:
        UsageError: a word is neither; or there is none.
    """
    found: set[str] = set()
    for word in words:
        if word not in LEVELS and word not in GROUPS:
            raise UsageError(
                f"'{word}' is no level of verification; choose among {', '.join(LEVELS)}, "
                f"or the groups {', '.join(GROUPS)}"
            )
        found.update(GROUPS.get(word, (word,)))
    if not found:
        raise UsageError(f"no level of verification is named; choose among {', '.join(LEVELS)}")
    return tuple(level for level in LEVELS if level in found)


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """Read a ``tpshard.toml``; what it leaves out has its usual value.

    Raises:
        UsageError: it is no TOML, has a key that nothing reads, or a value that makes no sense.
        StorageError: it cannot be read.
    """
    name = shown(path)
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            raw = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise UsageError(f"{name} does not exist; name the file that holds the gates with --gates") from None
    except OSError as error:
        raise StorageError(f"{name}: reading it failed: {error.strerror or error}") from None
    if len(raw) > _LARGEST:
        raise UsageError(f"{name} has more than {_LARGEST} bytes; a file of gates has a few lines")
    return _Reader(name).settings(_parsed(raw, name))


def _parsed(raw: bytes, name: str) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        import tomli as toml
    try:
        return dict(toml.loads(raw.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not TOML: {error}") from None


class _Reader:
    """Takes values out of the file by key, and refuses what is left over."""

    def __init__(self, name: str) -> None:
        self.name = name

    def settings(self, values: Mapping[str, Any]) -> Settings:
        self._only(values, "", ("verify", "gates"))
        verify = self._table(values, "verify")
        self._only(verify, "verify", ("levels", "compute", "mode", "tokens", "min_coverage"))
        out = Settings(gates=self._gates(self._table(values, "gates")))
        if "levels" in verify:
            words = verify["levels"]
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                self._wrong("verify.levels", words, 'a list of levels such as ["standard"]')
            out = replace(out, levels=expanded(words))
        if "compute" in verify:
            out = replace(out, compute=self._choice("verify.compute", verify["compute"], COMPUTE))
        if "mode" in verify:
            out = replace(out, mode=self._choice("verify.mode", verify["mode"], MODES))
        if "tokens" in verify:
            tokens = verify["tokens"]
            if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= 1 << 20:
                self._wrong("verify.tokens", tokens, "a whole number from 1")
            out = replace(out, tokens=tokens)
        if "min_coverage" in verify:
            part = self._number("verify.min_coverage", verify["min_coverage"])
            if part > 1:
                self._wrong("verify.min_coverage", part, "a part from 0 to 1")
            out = replace(out, min_coverage=part)
        return out

    def _gates(self, values: Mapping[str, Any]) -> Gates:
        self._only(values, "gates", COMPUTE)
        gates = Gates()
        for compute in values:
            given = self._table(values, compute, "gates.")
            where = f"gates.{compute}"
            self._only(given, where, ("default", "fp32_inside", "logits", "blocks"))
            blocks = self._table(given, "blocks", f"{where}.")
            numbers = {key: self._number(f"{where}.{key}", given[key]) for key in given if key != "blocks"}
            patterns = tuple((key, self._number(f'{where}.blocks."{key}"', value)) for key, value in blocks.items())
            gate: Gate = replace(getattr(gates, compute), **numbers, blocks=patterns)
            gates = replace(gates, **{compute: gate})
        return gates

    def _table(self, values: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
        found = values.get(key, {})
        if not isinstance(found, dict):
            self._wrong(where + key, found, f"a table [{where}{key}]")
        return found

    def _only(self, values: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
        for key in values:
            if key not in known:
                full = f"{where}.{key}" if where else key
                raise UsageError(f"{self.name} has a key that nothing reads: {full}; known here: {', '.join(known)}")

    def _number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            self._wrong(key, value, "a number from 0")
        return float(value)

    def _choice(self, key: str, value: object, known: Sequence[str]) -> str:
        if value not in known:
            self._wrong(key, value, f"one of {', '.join(known)}")
        return str(value)

    def _wrong(self, key: str, value: object, wanted: str) -> NoReturn:
        raise UsageError(f"{self.name}: {key} is {value!r:.80}, and must be {wanted}")
