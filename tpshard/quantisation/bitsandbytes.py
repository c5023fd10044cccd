"""bitsandbytes: int8 with one scale an output, and nf4 or fp4 in one line of runs of 64 elements.

int8: ``weight [out, in]`` I8, ``SCB [out]`` F32, ``weight_format`` one byte. 4 bits: ``weight [bytes, 1]`` with the
matrix row after row, ``weight.absmax`` with one value for each run of elements, in double quantisation one byte, and
then ``weight.nested_absmax`` with one value for each 256 of those; tables and ``quant_state`` whole. A matrix is cut by
whole rows as long as runs end where rows do, or where several rows' do; along its inputs where every row has whole
runs. The matrix that is stored is ``[out, in]`` in every family.
Source: bitsandbytes ``functional.py`` (``QuantState.as_dict``, ``quantize_4bit``), ``nn/modules.py``
(``Linear8bitLt``, ``Params4bit``); transformers ``integrations/bitsandbytes.py``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.header import DTYPE_BITS

from .formats import IN, OUT, Flat, Format, Member, Of

METHODS = ("bitsandbytes", "bitsandbytes_8bit", "bitsandbytes_4bit")
STORAGE = ("U8", "I8", "F16", "BF16", "F32")
RUNS = (64, 128, 256, 512, 1024, 2048, 4096, 32)  # elements with one scale; no config tells
NESTED = 256  # scales with one scale
STATE = "quant_state tells the whole matrix's shape: a rank's part has its own"


def formats(c: Config) -> list[Format]:
    int8 = Format(
        "bitsandbytes int8",
        (
            Member(".weight", "values", ((Of(OUT), Of(IN)),)),
            Member(".SCB", "scale", ((Of(OUT),),)),
            Member(".weight_format", "state", ((), (1,)), optional=True),
        ),
        dtypes=frozenset({"I8"}),
    )
    return [int8, *(_four_bits(dtype, run) for dtype in STORAGE for run in RUNS)]


def _four_bits(dtype: str, run: int) -> Format:
    line = Flat(1, DTYPE_BITS[dtype] // 4)
    table = ((None,),)
    return Format(
        f"bitsandbytes 4-bit in runs of {run}",
        (
            Member(".weight", "packed", ((line, 1), (1, line))),
            Member(".weight.absmax", "scale", ((Flat(1, run),),)),
            Member(".weight.quant_map", "state", table),
            Member(".weight.nested_absmax", "scale", ((Flat(1, run * NESTED),),), optional=True),
            Member(".weight.nested_quant_map", "state", table, optional=True),
            *(
                Member(f".weight.quant_state.bitsandbytes__{kind}", "state", table, optional=True, note=STATE,
                       noted=(OUT, IN))
                for kind in ("nf4", "fp4")
            ),
        ),
        dtypes=frozenset({dtype}),
        plain=True,
    )  # fmt: skip
