"""AWQ, GEMM version: integers packed along the outputs, scales and zero points a group of inputs.

``qweight [in, out * bits / 32]`` int32, ``qzeros [groups, out * bits / 32]`` int32, ``scales [groups, out]``. A word
holds 8 consecutive outputs in the order 0 2 4 6 1 3 5 7, so words stay whole and the order does not matter here.
Source: AutoAWQ ``awq/modules/linear/gemm.py`` (``WQLinear_GEMM``).
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.errors import UnsupportedError

from .formats import IN, OUT, Format, Member, Of

METHODS = ("awq",)
WORD = 32  # bits


def formats(c: Config) -> list[Format]:
    bits, group = c.count("bits", "w_bit", default=4), c.count("group_size", "q_group_size", default=128)
    version = str(c.get("version", default="gemm")).lower()
    if version != "gemm":
        raise UnsupportedError(
            f"config.json: AWQ version {version!r}, which packs and pads along the inputs; "
            "the version 'gemm' can be cut"
        )
    grouped = Of(IN, 1, group)
    return [
        Format(
            f"AWQ with {bits} bits in groups of {group}",
            (
                Member(".qweight", "packed", ((Of(IN), Of(OUT, bits, WORD)),)),
                Member(".scales", "scale", ((grouped, Of(OUT)),)),
                Member(".qzeros", "zero", ((grouped, Of(OUT, bits, WORD)),), optional=True),
            ),
        )
    ]
