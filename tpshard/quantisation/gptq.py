"""GPTQ: integers packed along the inputs, scales and zero points a group of inputs, an order of the inputs.

``qweight [in * bits / 32, out]`` int32, ``qzeros [groups, out * bits / 32]`` int32, ``scales [groups, out]``,
``g_idx [in]`` int32 with the group of every input. With ``desc_act`` the groups of consecutive inputs are not
consecutive: a row-parallel rank needs the scales of all groups, and holds them whole.
Source: AutoGPTQ ``nn_modules/qlinear/qlinear_cuda.py`` and GPTQModel, ``pack``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.errors import UnsupportedError

from .formats import IN, OUT, Form, Format, Member, Of

METHODS = ("gptq",)
WORD = 32  # bits
FROM_ZERO = "numbers of groups count from the whole matrix's first: subtract that of the rank's first input"


def formats(c: Config) -> list[Format]:
    bits = c.count("bits")
    if bits not in (2, 3, 4, 8):
        raise UnsupportedError(f"config.json: GPTQ with {bits} bits; 2, 3, 4 and 8 can be cut")
    group, reordered = c.get("group_size", default=-1), c.flag("desc_act", default=False)
    grouped: Of | int | None
    if group == -1:
        grouped = 1
    elif reordered:
        grouped = None
    else:
        grouped = Of(IN, 1, c.count("group_size"))
    scales: Form = (grouped, Of(OUT))
    zeros: Form = (grouped, Of(OUT, bits, WORD))
    order = "" if grouped in (1, None) else FROM_ZERO
    return [
        Format(
            f"GPTQ with {bits} bits" + (f" in groups of {group}" if group != -1 else ""),
            (
                Member(".qweight", "packed", ((Of(IN, bits, WORD), Of(OUT)),)),
                Member(".scales", "scale", (scales,)),
                Member(".qzeros", "zero", (zeros,), optional=True),  # of symmetric ones some writers leave it out
                Member(".g_idx", "order", ((Of(IN),),), optional=True, note=order),
            ),
        )
    ]
