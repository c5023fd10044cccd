"""AutoRound: what another method stores, by ``packing_format`` (``auto_round:auto_gptq``, ``auto_round:auto_awq``).

``extra_config`` gives some modules numbers of their own.
Source: intel/auto-round ``auto_round/export``; transformers ``utils/quantization_config.py`` (``AutoRoundConfig``).
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.errors import UnsupportedError

from . import awq, compressed, fp8, gptq
from .formats import Format

METHODS = ("auto-round", "auto_round", "intel/auto-round")


def formats(c: Config) -> list[Format]:
    packing = str(c.get("packing_format", "backend", default="auto_round"))
    own = Config({key: value for key, value in c.values.items() if key not in ("format", "checkpoint_format")})
    if "awq" in packing:
        return awq.formats(own)
    if "llm_compressor" in packing:
        return compressed.formats(c)
    if "fp8" in packing:
        return fp8.formats(own)
    if "marlin" in packing or "ark" in packing.split(":"):
        raise UnsupportedError(
            f"config.json: AutoRound in the layout {packing!r}, which is permuted for one kernel and cannot be cut; "
            "use a checkpoint in 'auto_round:auto_gptq' or 'auto_round:auto_awq'"
        )
    return gptq.formats(own)
