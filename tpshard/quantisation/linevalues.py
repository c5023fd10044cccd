"""bitsandbytes' nf4 and fp4: a matrix in one line of codes, row after row, with a scale for each run of elements.

The first of two values is in the upper half of a byte. In double quantisation scales are bytes themselves: numbers of a
table times a scale for each 256 of them, plus one offset that ``quant_state`` holds. A rank's line is its own rows, or
its own inputs of every row; both begin and end with whole runs.
Source: bitsandbytes ``backends/default/ops.py`` (``_dequantize_blockwise_compute``), ``functional.py``
(``dequantize_4bit``, ``QuantState.from_dict``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from tpshard.errors import DamagedError, short

from .cells import Bounds
from .formats import IN, OUT, Flat
from .valuecodes import Array, floats, rounded
from .values import Matrix, Read, StoredPart, Window

STATE = "quant_state.bitsandbytes__"


@dataclass(frozen=True)
class LineMatrix(Matrix):
    """A matrix (or a rank's part of one) whose elements lie in one line."""

    def bounds(self, part: StoredPart, box: Window, groups: Array | None = None) -> tuple[Bounds, ...]:
        """What of a stored tensor is needed for a window."""
        width = self.lengths[IN]
        (top, bottom), (left, right) = box[OUT], box[IN]
        first, last = top * width + left, (bottom - 1) * width + right
        return tuple(
            (first // entry.per, -(-last // entry.per)) if isinstance(entry, Flat) else (0, length)
            for entry, length in zip(part.form, part.shape, strict=True)
        )

    def _values(self, box: Window, read: Read, dtype: str) -> Array:
        (top, bottom), (left, right) = box[OUT], box[IN]
        width = self.lengths[IN]
        parts = {part.member.suffix.removeprefix(".weight").removeprefix("."): part for part in self.parts}
        numbers = floats(read(parts["quant_map"], ((0, parts["quant_map"].shape[0]),)), parts["quant_map"].dtype)
        offset = self._offset(parts, read)
        if (left, right) == (0, width):
            line = self._line(parts, numbers, offset, top * width, bottom * width, read)
        else:
            rows = [
                self._line(parts, numbers, offset, row * width + left, row * width + right, read)
                for row in range(top, bottom)
            ]
            line = np.concatenate(rows) if rows else np.empty(0, np.float32)
        return rounded(line.reshape(bottom - top, right - left), dtype)

    def _line(
        self, parts: dict[str, StoredPart], numbers: Array, offset: Array, first: int, last: int, read: Read
    ) -> Array:
        """The values of elements ``[first, last)`` of the line, float32."""
        packed, absmax = parts[""], parts["absmax"]
        each = _per(packed)
        low, high = first // each, -(-last // each)
        stored = read(packed, tuple((0, 1) if length == 1 else (low, high) for length in packed.shape))
        octets = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        codes = np.empty((len(octets), 2), np.uint8)
        np.right_shift(octets, 4, out=codes[:, 0])
        np.bitwise_and(octets, 15, out=codes[:, 1])
        codes = codes.reshape(-1)[first - low * each : last - low * each]
        run = _per(absmax)
        begin, end = first // run, -(-last // run)
        scales = floats(read(absmax, ((begin, end),)), absmax.dtype)
        if "nested_absmax" in parts:
            scales = self._nested(parts, scales.astype(np.intp), begin, end, read) + offset
        of_element = np.repeat(scales, run)[first - begin * run : last - begin * run]
        return np.asarray(np.take(numbers, codes, mode="clip") * of_element)

    def _nested(self, parts: dict[str, StoredPart], codes: Array, begin: int, end: int, read: Read) -> Array:
        """Scales in double quantisation, without the offset."""
        table, outer = parts["nested_quant_map"], parts["nested_absmax"]
        each = _per(outer) // _per(parts["absmax"])
        low, high = begin // each, -(-end // each)
        numbers = floats(read(table, ((0, table.shape[0]),)), table.dtype)
        scales = floats(read(outer, ((low, high),)), outer.dtype)
        return np.asarray(numbers[codes] * np.repeat(scales, each)[begin - low * each : end - low * each])

    def _offset(self, parts: dict[str, StoredPart], read: Read) -> Array:
        """What is added to nested scales."""
        state = next((part for suffix, part in parts.items() if suffix.startswith(STATE)), None)
        if "nested_absmax" not in parts:
            return np.zeros((), np.float32)
        raw = b"" if state is None else read(state, ((0, state.shape[0]),)).tobytes()
        try:
            return np.array(json.loads(raw)["nested_offset"], np.float32)
        except (ValueError, KeyError, TypeError):
            raise DamagedError(
                f"{short(self.name)} has nested scales, and its quant_state does not say their offset "
                "('nested_offset'); download the checkpoint again"
            ) from None


def _per(part: StoredPart) -> int:
    """Elements of the matrix for one stored."""
    return next(entry.per for entry in part.form if isinstance(entry, Flat))
