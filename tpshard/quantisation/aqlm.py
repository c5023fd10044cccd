"""AQLM: every group of weights is a sum of vectors from codebooks that all groups share.

``codes [out / out_group, in / in_group, codebooks]``, ``codebooks [codebooks, size, out_group, in_group]`` whole,
``scales [out / out_group, 1, 1, 1]``.
Source: Vahe1994/AQLM ``inference_lib/src/aqlm/inference.py`` (``QuantizedLinear``).
"""

from __future__ import annotations

from tpshard.config import Config

from .formats import IN, OUT, Format, Member, Of

METHODS = ("aqlm",)


def formats(c: Config) -> list[Format]:
    rows, columns = c.count("out_group_size", default=1), c.count("in_group_size", default=8)
    books, out = c.count("num_codebooks", default=1), Of(OUT, 1, rows)
    return [
        Format(
            f"AQLM in groups of {rows} x {columns}",
            (
                Member(".codes", "packed", ((out, Of(IN, 1, columns), books),)),
                Member(".codebooks", "state", ((books, None, rows, columns),)),
                Member(".scales", "scale", ((out, 1, 1, 1),)),
            ),
        )
    ]
