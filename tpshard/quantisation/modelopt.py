"""ModelOpt (NVIDIA TensorRT Model Optimizer): FP8, NVFP4, MXFP4, MXFP8 and 4-bit AWQ, module by module.

FP8: ``weight`` beside ``weight_scale`` (one value, one an output, or ``[out / 128, 1, in / 128, 1]``). NVFP4: ``weight
[out, in / 2]`` U8, ``weight_scale [out, in / 16]`` FP8 and ``weight_scale_2``, one for all. AWQ: ``weight [out / 2,
in]`` U8 with two consecutive outputs a byte, ``weight_scale [out, in / group]``, ``pre_quant_scale [in]``.
Source: NVIDIA/TensorRT-Model-Optimizer ``modelopt/torch/export/quant_utils.py`` (``to_quantized_weight``,
``pack_int4_in_uint8``).
"""

from __future__ import annotations

from tpshard.config import Config

from .compressed import BYTES, fp4
from .formats import FLOATS8, IN, ONE, OUT, Form, Format, Member, Of, Parts, banked
from .fp8 import BY_PART, PER_OUT, activations, bank, scaled

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8")
BLOCK = 128


def formats(c: Config) -> list[Format]:
    group = c.count("group_size", default=BLOCK)
    once = (*ONE, (Parts(OUT),))
    smooth = Member(".pre_quant_scale", "scale", ((Of(IN),),), optional=True)
    blocks: tuple[Form, ...] = tuple(
        form for size in dict.fromkeys((BLOCK, group)) for form in
        ((Of(OUT, 1, size), 1, Of(IN, 1, size), 1), (Of(OUT, 1, size), Of(IN, 1, size)))
    )  # fmt: skip
    fp8 = scaled("FP8", FLOATS8, (*PER_OUT, *ONE, *BY_PART, *blocks))
    nvfp4 = fp4("NVFP4", 16, Member(".weight_scale_2", "state", once), smooth, weight=".weight")
    mxfp4 = fp4("MXFP4", 32, smooth, weight=".weight")
    mxfp8 = scaled("MXFP8", FLOATS8, ((Of(OUT), Of(IN, 1, 32)),))
    awq = Format(
        f"int4 in groups of {group}",
        (
            Member(".weight", "packed", ((Of(OUT, 1, 2), Of(IN)),)),
            Member(".weight_scale", "scale", ((Of(OUT), Of(IN, 1, group)),)),
            Member(".weight_scale_2", "state", once, optional=True),
            smooth,
            *activations(),
        ),
        dtypes=BYTES,
    )
    stacked = {member.suffix: "_" + member.suffix.removeprefix(".") for member in nvfp4.members} | {".weight": ""}
    return [nvfp4, mxfp8, fp8, mxfp4, awq, banked(nvfp4, stacked), bank(fp8, ""), banked(fp8, stacked)]
