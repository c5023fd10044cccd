"""ModelOpt's own file beside config.json, for checkpoints whose config.json says nothing of the quantisation.

``hf_quant_config.json``: ``{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16,
"kv_cache_quant_algo": ..., "exclude_modules": [...]}}``.
Source: NVIDIA/TensorRT-Model-Optimizer ``modelopt/torch/export/unified_export_hf.py``, ``convert_hf_config.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tpshard.errors import UnsupportedError
from tpshard.listing import shown
from tpshard.opened import read_small
from tpshard.strictjson import parse_object

from .methods import quantisation_of

NAME = "hf_quant_config.json"
_LARGEST = 16 << 20


def with_separate(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """The config with the quantisation that a file beside it declares, where it declares none itself.

    Raises:
        DamagedError: the file is no JSON object.
        UnsupportedError: it is not ModelOpt's.
        StorageError: it cannot be read.
    """
    path = root / NAME
    if quantisation_of(config) is not None or not path.is_file():
        return config
    values = parse_object(read_small(path, _LARGEST), shown(path), "Download or copy the file again.")
    producer, declared = values.get("producer"), values.get("quantization")
    name = producer.get("name") if isinstance(producer, dict) else None
    if not isinstance(declared, dict) or name not in (None, "modelopt"):
        raise UnsupportedError(
            f"{shown(path)} declares a quantisation by {name!r:.80} that is not known here; put it into config.json as "
            "'quantization_config', with its 'quant_method'"
        )
    if not declared.get("quant_algo"):
        return config  # the KV cache alone, if anything
    return {**config, "quantization_config": {**declared, "quant_method": "modelopt"}}
