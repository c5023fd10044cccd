"""AWQ: integers packed along the outputs (GEMM) or the inputs (GEMV), scales and zero points a group of inputs.

GEMM: ``qweight [in, out * bits / 32]`` int32, ``qzeros [groups, out * bits / 32]`` int32, ``scales [groups, out]``. A
word holds 8 consecutive outputs in the order 0 2 4 6 1 3 5 7, so words stay whole and the order does not matter here.
GEMV: ``qweight [out, in / 8]``, ``qzeros [out, words]``, ``scales [out, words * 8]``, where the words of 8 groups' zero
points are padded to a multiple of 1, 2 or 4 for groups of 128, 64 or 32 (and what they cover is on one rank here).
Source: AutoAWQ ``awq/modules/linear/gemm.py`` (``WQLinear_GEMM``), ``gemv.py`` (``calculate_zeros_width``).
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.errors import UnsupportedError

from .formats import IN, OUT, Format, Member, Of, packed

METHODS = ("awq",)
WORD = 32  # bits
NIBBLES = 8  # of a word
_PADDED = {64: 2, 32: 4}  # by group; larger groups are not padded further
_KERNELS = {
    "gemv_fast": "weaves the values of several outputs and inputs into 16-bit words for one kernel",
    "llm-awq": "weaves the values of several outputs and inputs into 16-bit words for one kernel",
    "marlin": "is permuted for one kernel",
    "exllama": "is permuted for one kernel",
}


def formats(c: Config) -> list[Format]:
    bits, group = c.count("bits", "w_bit", default=4), c.get("group_size", "q_group_size", default=128)
    version = str(c.get("version", "format", default="gemm")).lower()
    if version == "gemm":
        return [_gemm(bits, group if group == -1 else c.count("group_size", "q_group_size", default=128))]
    if version == "gemv" and bits == 4:
        return [_gemv(c.count("group_size", "q_group_size", default=128))]
    why = _KERNELS.get(version, "has a layout that is not known here")
    raise UnsupportedError(
        f"config.json: AWQ with {bits} bits in the version {version!r}, which {why}; use a checkpoint of the version "
        "'gemm', or 'gemv' with 4 bits"
    )


def _gemm(bits: int, group: int) -> Format:
    grouped: Of | int = 1 if group == -1 else Of(IN, 1, group)
    return Format(
        f"AWQ with {bits} bits" + (f" in groups of {group}" if group != -1 else ""),
        (
            Member(".qweight", "packed", ((Of(IN), packed(OUT, bits, WORD)),)),
            Member(".scales", "scale", ((grouped, Of(OUT)),)),
            Member(".qzeros", "zero", ((grouped, packed(OUT, bits, WORD)),), optional=True),
        ),
    )


def _gemv(group: int) -> Format:
    if group not in (32, 64) and group < 128:
        raise UnsupportedError(f"config.json: AWQ GEMV in groups of {group}, which its kernel has no layout for")
    words = _PADDED.get(group, 1)
    covered = NIBBLES * group * words
    return Format(
        f"AWQ GEMV with 4 bits in groups of {group}",
        (
            Member(".qweight", "packed", ((Of(OUT), Of(IN, 1, NIBBLES)),)),
            Member(".scales", "scale", ((Of(OUT), Of(IN, NIBBLES * words, covered)),)),
            Member(".qzeros", "zero", ((Of(OUT), Of(IN, words, covered)),)),
        ),
    )
