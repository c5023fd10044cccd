"""FP-Quant: MXFP4 or NVFP4 after a rotation of every group of inputs.

``qweight [out, in / 2]`` U8, ``scales [out, in / 32]`` (NVFP4: 16); the rotation is one matrix for all groups, whole on
every rank, and its groups stay whole. ``dqweight`` holds what was quantised in plain floats instead.
Source: IST-DASLab/FP-Quant ``fp_quant/module/linear.py``; transformers ``integrations/fp_quant.py``.
"""

from __future__ import annotations

from tpshard.config import Config

from .formats import EVERY_FLOAT, IN, ONE, OUT, Format, Member, Of

METHODS = ("fp_quant",)
GROUPS = {"mxfp4": 32, "nvfp4": 16}


def formats(c: Config) -> list[Format]:
    name = str(c.get("forward_dtype", default="nvfp4"))
    group = GROUPS.get(name, 16)
    rotated = c.count("hadamard_group_size", default=group)
    state = (
        *(Member(f".{name}_global_scale", "state", ONE, optional=True) for name in ("weight", "act")),
        *(
            Member(f".{name}_hadamard_matrix", "state", ((rotated, rotated),), optional=True)
            for name in ("forward", "backward")
        ),
        Member(".weight", "state", ((0,),), optional=True),  # an empty one that the module's own code asks for
        Member(".bias_correction", "state", ONE, optional=True),
    )
    real = (
        Member(".qweight", "packed", ((Of(OUT), Of(IN, rotated // 2, rotated)),)),
        Member(".scales", "scale", ((Of(OUT), Of(IN, rotated // group, rotated)),)),
        Member(".dqweight", "state", ((0,),), optional=True),
    )
    pseudo = (
        Member(".dqweight", "packed", ((Of(OUT), Of(IN, rotated, rotated)),)),
        Member(".qweight", "state", ((0,),), optional=True),
        Member(".scales", "state", ((0,),), optional=True),
    )
    return [
        Format(f"{name} in groups of {group}", (*real, *state)),
        Format(f"{name}, in floats", (*pseudo, *state), dtypes=EVERY_FLOAT, plain=True),
    ]
