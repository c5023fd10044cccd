"""FP8: matrices as they are in one byte an element, with scales by block, by channel or for all.

``weight [out, in]`` F8_E4M3 with ``weight_scale_inv [ceil(out / rows), ceil(in / columns)]`` by blocks
(``weight_block_size`` of the config: DeepSeek-V3 and what transformers saves as ``fp8``), or ``weight_scale`` for all
of it; ``input_scale`` where activations have a static one. The last block of either dimension may be short.
Source: deepseek-ai/DeepSeek-V3 ``inference/kernel.py`` (``weight_dequant``); transformers
``integrations/finegrained_fp8.py``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.errors import DamagedError

from .formats import IN, OUT, Form, Format, Member, Of

METHODS = ("fp8",)
FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
ONE: tuple[Form, ...] = ((), (1,), (1, 1))  # one value for all


def formats(c: Config) -> list[Format]:
    block = c.get("weight_block_size")
    forms: tuple[Form, ...] = ((Of(OUT), 1), (Of(OUT),), *ONE)
    name = "FP8"
    if block is not None:
        sizes = block if isinstance(block, list | tuple) else []
        if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
            raise DamagedError(f"config.json: 'weight_block_size' is {block!r:.80}, not two numbers; restore it")
        rows, columns = sizes
        forms = ((Of(OUT, 1, rows), Of(IN, 1, columns)), *ONE)
        name = f"FP8 in blocks of {rows} x {columns}"
    return [
        Format(
            name,
            (
                Member(".weight", "values", ((Of(OUT), Of(IN)),)),
                Member(scale, "scale", forms),
                Member(".input_scale", "scale", ONE, optional=True),
                Member(".activation_scale", "scale", ONE, optional=True),
            ),
            dtypes=FLOATS,
        )
        for scale in (".weight_scale_inv", ".weight_scale")
    ]
