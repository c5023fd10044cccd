"""GPTQ: integers packed along the inputs, scales and zero points a group of inputs, an order of the inputs.

``qweight [in * bits / 32, out]`` int32, ``qzeros [groups, out * bits / 32]`` int32, ``scales [groups, out]``,
``g_idx [in]`` int32 with the group of every input; so too where the model itself stores ``[in, out]`` (GPT-2). Zero
points of version 1 are stored less one, which is nothing to a cut. With ``desc_act`` the groups of consecutive inputs
are not consecutive: a row-parallel rank needs the scales of all groups, and holds them whole.
Source: AutoGPTQ ``nn_modules/qlinear/qlinear_cuda.py`` and GPTQModel, ``pack``; GPTQModel ``quantization/config.py``
for ``dynamic`` (other numbers for some modules).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tpshard.config import Config
from tpshard.errors import DamagedError, UnsupportedError

from .formats import IN, OUT, Format, Member, Of, packed

METHODS = ("gptq", "gptqmodel")
LAYOUTS = ("gptq", "gptq_v2")
BITS = (2, 3, 4, 8)
FROM_ZERO = "numbers of groups count from the whole matrix's first: subtract that of the rank's first input"
WHOLE = "whole: an order of inputs (g_idx) names groups of the whole matrix"
WORDS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


def formats(c: Config) -> list[Format]:
    layout = str(c.get("checkpoint_format", "format", default="gptq")).lower()
    if layout not in LAYOUTS:
        raise UnsupportedError(
            f"config.json: GPTQ in the layout {layout!r}, which is permuted for one kernel and cannot be cut; use a "
            "checkpoint in the layout 'gptq' or 'gptq_v2'"
        )
    if c.flag("is_marlin_format", default=False):
        raise UnsupportedError(
            "config.json: GPTQ in Marlin's layout ('is_marlin_format'), which is permuted for one kernel and cannot be "
            "cut; use a checkpoint in the layout 'gptq'"
        )
    word = WORDS.get(str(c.get("pack_dtype", default="int32")))
    if word is None:
        raise UnsupportedError(f"config.json: GPTQ with 'pack_dtype' {c.get('pack_dtype')!r}; int8 to int64 can be cut")
    return list(dict.fromkeys(_format(numbers, word) for numbers in _numbers(c)))


def _numbers(c: Config) -> Iterator[Config]:
    """The config, and as it is for every set of modules that has numbers of its own."""
    yield c
    dynamic = c.get("dynamic", "extra_config", default={})
    if not isinstance(dynamic, Mapping):
        raise DamagedError(f"config.json: 'dynamic' is {dynamic!r:.80}, not an object; restore it")
    for own in dynamic.values():
        if isinstance(own, Mapping) and own and own.get("bits") not in (16, 32):
            yield Config({**c.values, **own})


def _format(c: Config, word: int) -> Format:
    bits = c.count("bits")
    if bits not in BITS:
        raise UnsupportedError(f"config.json: GPTQ with {bits} bits; 2, 3, 4 and 8 can be cut")
    group, reordered = c.get("group_size", default=-1), c.flag("desc_act", default=False)
    grouped: Of | int
    grouped = 1 if group == -1 else Of(IN, 1, c.count("group_size"), cut=not reordered)
    whole = WHOLE if group != -1 and reordered else ""
    order = FROM_ZERO if group != -1 and not reordered else ""
    return Format(
        f"GPTQ with {bits} bits" + (f" in groups of {group}" if group != -1 else ""),
        (
            Member(".qweight", "packed", ((packed(IN, bits, word), Of(OUT)),)),
            Member(".scales", "scale", ((grouped, Of(OUT)),), note=whole),
            # Some writers leave out the zero points of symmetric matrices.
            Member(".qzeros", "zero", ((grouped, packed(OUT, bits, word)),), optional=True, note=whole),
            Member(".g_idx", "order", ((Of(IN),),), optional=True, note=order),
        ),
    )
