"""FP8: matrices as they are in one byte an element, with scales by block, by channel, by part or for all.

``weight [out, in]`` F8_E4M3 with ``weight_scale_inv [ceil(out / rows), ceil(in / columns)]`` by blocks
(``weight_block_size`` of the config: DeepSeek-V3 and what transformers saves as ``fp8``; ``mxfp8`` has blocks of
1 x 32 and exponents as scales), or ``weight_scale`` for all of it, for every output, or for every part of a fused
matrix; ``input_scale`` where activations have a static one. The last block of either dimension may be short. Stacked
experts have the same in ``NAME`` and ``NAME_scale_inv``. DeepSeek-V4 stores experts in 4 bits, two values a byte, with
an exponent for 32 inputs.
Source: deepseek-ai/DeepSeek-V3 ``inference/kernel.py`` (``weight_dequant``); transformers
``integrations/finegrained_fp8.py``, ``integrations/fbgemm_fp8.py``, ``quantizers/quantizer_finegrained_fp8.py``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.errors import DamagedError

from .formats import FLOATS8, IN, ONE, OUT, Form, Format, Member, Of, Parts, banked

METHODS = ("fp8", "mxfp8", "fbgemm_fp8")
SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
BYTES = frozenset({"I8", "U8"})
PER_OUT: tuple[Form, ...] = ((Of(OUT), 1), (Of(OUT),), (1, Of(OUT)))
BY_PART: tuple[Form, ...] = ((Parts(OUT),), (Parts(OUT), 1))
VALUES: tuple[Form, ...] = ((Of(OUT), Of(IN)),)
_ACTIVATIONS = (
    ".input_scale", ".activation_scale", ".output_scale", ".qscale_act", ".input_scale_ub", ".input_zero_point",
    ".output_zero_point",
)  # fmt: skip


def activations(*more: str) -> tuple[Member, ...]:
    """Static scales of what goes into a matrix or comes out of it: one value for all."""
    return tuple([Member(suffix, "state", (*ONE, (Parts(OUT),)), optional=True) for suffix in (*_ACTIVATIONS, *more)])


def formats(c: Config) -> list[Format]:
    block = c.get("weight_block_size")
    forms: tuple[Form, ...] = (*PER_OUT, *ONE, *BY_PART)
    name = "FP8"
    if block is not None:
        sizes = block if isinstance(block, list | tuple) else []
        if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
            raise DamagedError(f"config.json: 'weight_block_size' is {block!r:.80}, not two numbers; restore it")
        rows, columns = sizes
        forms = ((Of(OUT, 1, rows), Of(IN, 1, columns)), *ONE, *PER_OUT)
        name = f"FP8 in blocks of {rows} x {columns}"
    out = []
    for scale in SCALES:
        out.append(scaled(name, FLOATS8, forms, scale=scale))
        halves = Member(".weight", "packed", ((Of(OUT), Of(IN, 1, 2)),))
        exponents = Member(scale, "scale", ((Of(OUT), Of(IN, 1, 32)),))
        out.append(Format("FP4 in groups of 32", (halves, exponents), dtypes=BYTES, plain=True))
    return out + [bank(fmt, scale) for fmt, scale in zip(out[::2], SCALES, strict=True)]


def scaled(
    name: str, dtypes: frozenset[str], forms: tuple[Form, ...], *, scale: str = ".weight_scale", zero: str = ""
) -> Format:
    """Matrices in their own shape beside scales (and, under the suffix ``zero``, zero points) of one of the forms."""
    zeros = (Member(zero, "zero", forms, optional=True),) if zero else ()
    members = (Member(".weight", "values", VALUES), Member(scale, "scale", forms), *zeros, *activations())
    return Format(name, members, dtypes=dtypes)


def bank(fmt: Format, scale: str) -> Format:
    """The same for stacked experts: ``gate_up_proj`` and ``gate_up_proj_scale_inv``."""
    suffixes = {member.suffix: "_" + member.suffix.removeprefix(".") for member in fmt.members}
    return banked(fmt, suffixes | {".weight": "", scale: scale.replace(".weight", "").replace(".", "_")})
