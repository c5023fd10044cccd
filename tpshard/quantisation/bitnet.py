"""BitNet whose weights are stored as floats and made ternary when they are used.

With ``linear_class`` ``autobitlinear`` the ``weight`` is a plain matrix; offline it holds ternary values beside
``weight_scale [1]``, online it is made ternary by the mean of all its absolute values, which a rank has only a part
of. The packed kind (``bitlinear``) is refused: one byte holds four rows that lie a quarter of the matrix apart.
Source: transformers ``integrations/bitnet.py`` (``pack_weights``, ``AutoBitLinear``, ``WeightQuant``).
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.errors import UnsupportedError

from .formats import EVERY_FLOAT, ONE, Format
from .fp8 import scaled

METHODS = ("bitnet",)


def formats(c: Config) -> list[Format]:
    if c.get("linear_class", default="bitlinear") != "autobitlinear":
        raise UnsupportedError(
            "config.json: BitNet packs four rows that lie a quarter of the matrix apart into one byte, so that no "
            "rank's rows are bytes of their own; use the checkpoint with unpacked weights ('autobitlinear', often "
            "named -bf16)"
        )
    if c.get("quantization_mode", default="offline") != "offline":
        raise UnsupportedError(
            "config.json: BitNet's online mode scales every matrix by the mean of all its absolute values when it "
            "runs, and a rank that holds a part would use the part's; use a checkpoint of the offline mode, or remove "
            "'quantization_config' and make the weights ternary in your engine before they are cut"
        )
    offline = scaled("ternary weights as floats", EVERY_FLOAT, ONE)
    return [Format(offline.name, offline.members, dtypes=EVERY_FLOAT, plain=True)]
