"""MXFP4: four-bit floats, two a byte, with a power of two for every 32 inputs.

gpt-oss stacks its experts: ``NAME_blocks [experts, out, in / 32, 16]`` and ``NAME_scales [experts, out, in / 32]``, U8,
always with the inputs last, whatever the order of the model's own ``NAME``.
Source: transformers ``integrations/mxfp4.py`` (``convert_moe_packed_tensors``); OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from tpshard.config import Config

from .formats import BANK, IN, OUT, Format, Member, Of

METHODS = ("mxfp4",)
GROUP = 32


def formats(c: Config) -> list[Format]:
    groups = Of(IN, 1, GROUP)
    name = f"MXFP4 in groups of {GROUP}"
    return [
        Format(
            name,
            (
                Member("_blocks", "packed", ((Of(BANK), Of(OUT), groups, GROUP // 2),)),
                Member("_scales", "scale", ((Of(BANK), Of(OUT), groups),)),
            ),
            weight="",
        ),
        Format(
            name,
            (
                Member(".weight_blocks", "packed", ((Of(OUT), groups, GROUP // 2),)),
                Member(".weight_scales", "scale", ((Of(OUT), groups),)),
            ),
        ),
    ]
