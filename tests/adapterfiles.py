"""Adapters of random bytes for the Llama of weights.py, written without peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from weights import Tensor, nbytes, write

SHAPES = {  # of a layer of the Llama in weights.py, [out, in]
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.up_proj": (44, 32),
    "mlp.down_proj": (32, 44),
}
Shapes = dict[str, tuple[int, ...]]


def pairs(rank: int = 4, prefix: str = "base_model.model.model.", own: str = "", layers: int = 2) -> Shapes:
    """The tensors of an adapter of all these modules."""
    out: Shapes = {}
    for layer in range(layers):
        for module, (rows, columns) in SHAPES.items():
            name = f"{prefix}layers.{layer}.{module}"
            out[f"{name}.lora_A{own}.weight"] = (rank, columns)
            out[f"{name}.lora_B{own}.weight"] = (rows, rank)
    return out


def write_adapter(directory: Path, shapes: Mapping[str, tuple[int, ...]], **config: Any) -> Path:
    """An adapter of random bytes."""
    directory.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "org/base"} | config
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    (directory / "README.md").write_text("# an adapter\n")
    random = np.random.default_rng(1)
    tensors = {name: Tensor("F32", shape, random.bytes(nbytes("F32", shape))) for name, shape in shapes.items()}
    write(directory / "adapter_model.safetensors", tensors)
    return directory
