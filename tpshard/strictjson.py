"""JSON objects from files that may be damaged or hostile: one error class, bounded work.

The standard parser takes duplicate keys (the last wins), ``NaN``, and integers of any length (whose
conversion is quadratic), and reports deep nesting as ``RecursionError``. Here each of them is a
:class:`~tpshard.errors.DamagedError` that names the file.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from tpshard.errors import DamagedError

_LONGEST_INTEGER = 40  # characters; 2**63 has 19, so this is far beyond anything meant
_SMALL = 1 << 20  # bytes; below it no text can grow to a size that matters


class _Refused(ValueError):
    """A reason that is already a sentence."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {key!r:.200} stands twice in one object")
            seen.add(key)
    return found


def _integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:
        raise _Refused(f"an integer of {len(text):,} digits")
    return int(text)


def _float(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise _Refused(f"the number {text:.40} is too large")
    return found


def _constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=_integer, parse_float=_float, parse_constant=_constant)
_OF_CONFIGS = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=_integer, parse_float=_float)


def parse_config(raw: bytes, what: str, remedy: str) -> dict[str, Any]:
    """Like :func:`parse_object` for a model's ``config.json``, where ``Infinity`` and ``NaN`` are numbers.

    transformers writes and reads them so: ``"time_step_limit": [0.0, Infinity]`` of Mamba-2.
    """
    return _parsed(raw, what, remedy, _OF_CONFIGS)


def parse_object(raw: bytes, what: str, remedy: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose top level is an object.

    ``what`` opens the error message ("config.json", "model.safetensors: the header"); ``remedy`` ends
    it. A key that stands twice in one object, ``NaN``, an integer of more than 40 digits, nesting
    beyond the interpreter's recursion limit, a number beyond the range of a double, an
    escaped lone surrogate and, in texts over 1 MiB, a density of brackets and commas that no real file has (it would
    take many times the text's size in memory) raise :class:`DamagedError`.
    """
    return _parsed(raw, what, remedy, _DECODER)


def _parsed(raw: bytes, what: str, remedy: str, decoder: json.JSONDecoder) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedError(f"{what} is not UTF-8 (byte {error.start:,} of {len(raw):,}). {remedy}") from None
    if len(raw) > _SMALL and 8 * (raw.count(b"{") + raw.count(b"[")) + 3 * raw.count(b",") > len(raw):
        raise DamagedError(f"{what} is {len(raw):,} bytes that are mostly brackets and commas. {remedy}")
    try:
        found = decoder.decode(text)
    except _Refused as error:
        raise DamagedError(f"{what} is not valid: {error}. {remedy}") from None
    except RecursionError:
        raise DamagedError(f"{what} is not valid: it is nested too deeply. {remedy}") from None
    except json.JSONDecodeError as error:
        raise DamagedError(f"{what} is not valid JSON: {error.msg} at character {error.pos:,}. {remedy}") from None
    except ValueError as error:
        raise DamagedError(f"{what} is not valid JSON: {error}. {remedy}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{what} is a JSON {type(found).__name__}, not an object. {remedy}")
    # The text itself decoded, so a lone surrogate can only have come from an escape.
    if b"\\ud" in raw or b"\\uD" in raw:
        try:
            json.dumps(found, ensure_ascii=False).encode("utf-8")
        except (UnicodeEncodeError, RecursionError):
            raise DamagedError(f"{what} is not valid: it has half of a surrogate pair. {remedy}") from None
    return found
