"""Quantised Llamas that can be run: random matrices of a size at which no softmax saturates, in real formats.

Neither torch nor tpshard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from quantmodels import llama, matrices_of
from quantschemes import AWQ_ORDER, Parts, bits_of, compressed_config
from weights import CONFIG, llama_shapes, tensor, write

GROUP = 16
CONFIG_LAYERS = 2
Maker = Callable[[Any, int, int], Parts]


def small(random: Any, *shape: int) -> Any:
    """Scales of integers: positive, and unlike each other."""
    return tensor(random.uniform(0.01, 0.03, shape).astype(np.float16), "F16")


def gptq(random: Any, out: int, into: int, *, reordered: bool = False) -> Parts:
    order = np.arange(into) // GROUP
    if reordered:
        random.shuffle(order)
    return {
        ".qweight": tensor(bits_of(random.integers(0, 16, (out, into)), 4, 32).T, "I32"),
        ".qzeros": tensor(bits_of(random.integers(4, 12, (into // GROUP, out)), 4, 32), "I32"),
        ".scales": small(random, into // GROUP, out),
        ".g_idx": tensor(order.astype(np.int32), "I32"),
    }


def ordered_gptq(random: Any, out: int, into: int) -> Parts:
    return gptq(random, out, into, reordered=True)


def awq(random: Any, out: int, into: int) -> Parts:
    def woven(values: Any) -> Any:
        return bits_of(values.reshape(len(values), -1, 8)[..., AWQ_ORDER].reshape(values.shape), 4, 32)

    return {
        ".qweight": tensor(woven(random.integers(0, 16, (into, out))), "I32"),
        ".qzeros": tensor(woven(random.integers(4, 12, (into // GROUP, out))), "I32"),
        ".scales": small(random, into // GROUP, out),
    }


def codes8(random: Any, *shape: int) -> Any:
    """E4M3 of either sign from 1/16 to 2."""
    return (random.integers(24, 64, shape) | (random.integers(0, 2, shape) << 7)).astype(np.uint8)


def fp8_blocks(random: Any, out: int, into: int) -> Parts:
    lines = -(-out // GROUP), -(-into // GROUP)
    scales = random.uniform(0.1, 0.4, lines).astype(np.float32)
    return {".weight": tensor(codes8(random, out, into), "F8_E4M3"), ".weight_scale_inv": tensor(scales, "F32")}


def fp8_outputs(random: Any, out: int, into: int) -> Parts:
    scales = random.uniform(0.1, 0.4, (out, 1)).astype(np.float32)
    return {".weight": tensor(codes8(random, out, into), "F8_E4M3"), ".weight_scale": tensor(scales, "F32")}


def nvfp4(random: Any, out: int, into: int) -> Parts:
    return {
        ".weight_packed": tensor(random.integers(0, 256, (out, into // 2)).astype(np.uint8), "U8"),
        ".weight_scale": tensor(codes8(random, out, into // GROUP) & 127, "F8_E4M3"),
        ".weight_global_scale": tensor(np.array([9.5], np.float32), "F32"),
    }


def packed(random: Any, out: int, into: int) -> Parts:
    """compressed-tensors, asymmetric."""
    return {
        ".weight_packed": tensor(bits_of(random.integers(0, 16, (out, into)), 4, 32), "I32"),
        ".weight_scale": small(random, out, into // GROUP),
        ".weight_zero_point": tensor(bits_of(random.integers(4, 12, (into // GROUP, out)), 4, 32).T, "I32"),
        ".weight_shape": tensor(np.array([out, into], np.int64), "I64"),
    }


def nf4(random: Any, out: int, into: int) -> Parts:
    """bitsandbytes, in runs of 32 elements."""
    numbers = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
    state = json.dumps({"quant_type": "nf4", "blocksize": 32, "dtype": "float16", "shape": [out, into]}).encode()
    return {
        ".weight": tensor(random.integers(0, 256, (out * into // 2, 1)).astype(np.uint8), "U8"),
        ".weight.absmax": tensor(random.uniform(0.1, 0.3, out * into // 32).astype(np.float32), "F32"),
        ".weight.quant_map": tensor(numbers, "F32"),
        ".weight.quant_state.bitsandbytes__nf4": tensor(np.frombuffer(state, np.uint8), "U8"),
    }


def int8(random: Any, out: int, into: int) -> Parts:
    """bitsandbytes: scales are the largest of a row, which stands for 127."""
    return {
        ".weight": tensor(random.integers(-127, 128, (out, into)).astype(np.int8), "I8"),
        ".SCB": tensor(random.uniform(0.1, 0.3, out).astype(np.float32), "F32"),
    }


def torchao(random: Any, out: int, into: int) -> Parts:
    return {
        "._weight_qdata": tensor(random.integers(-8, 8, (out, into)).astype(np.int8), "I8"),
        "._weight_scale": small(random, out, into // GROUP),
        "._weight_zero_point": tensor(random.integers(-3, 4, (out, into // GROUP)).astype(np.int8), "I8"),
    }


def metal(random: Any, out: int, into: int) -> Parts:
    return {
        ".weight": tensor(bits_of(random.integers(0, 16, (out, into)), 4, 32), "U32"),
        ".scales": small(random, out, into // GROUP),
        ".qbiases": tensor(random.uniform(-0.2, -0.1, (out, into // GROUP)).astype(np.float16), "F16"),
    }


_INTEGERS = {"bits": 4, "group_size": GROUP}
METHODS: Mapping[str, tuple[dict[str, Any], Maker]] = {
    "gptq": ({"quant_method": "gptq", "desc_act": False, **_INTEGERS}, gptq),
    "gptq-order": ({"quant_method": "gptq", "desc_act": True, **_INTEGERS}, ordered_gptq),
    "awq": ({"quant_method": "awq", "version": "gemm", "zero_point": True, **_INTEGERS}, awq),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8_blocks),
    "fp8-outputs": ({"quant_method": "fp8"}, fp8_outputs),
    "nvfp4": (
        compressed_config("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": GROUP}), nvfp4,
    ),
    "compressed": (
        compressed_config("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group",
                                             "group_size": GROUP}), packed,
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8),
    "torchao": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": {
            "granularity": {"_type": "PerGroup", "_data": {"group_size": GROUP}}}}}}, torchao,
    ),
    "metal": ({"quant_method": "metal", "mode": "affine", **_INTEGERS}, metal),
}  # fmt: skip


def write_llama(directory: Path, method: str, *, seed: int = 0, **sizes: int) -> dict[str, Any]:
    """A Llama of two layers whose matrices are all quantised but the embedding; returns its config."""
    quantisation, make = METHODS[method]
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "hidden": 64, "vocab": 48} | sizes
    config = {**CONFIG, **llama(**shape), "num_hidden_layers": 1, "quantization_config": quantisation}
    random = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, lengths in llama_shapes(config).items():
        if "norm" in name or "embed" in name:
            value = random.normal(1.0 if "norm" in name else 0.0, 0.3, lengths)
            tensors[name] = tensor(value.astype(np.float16), "F16")
    for matrix in matrices_of(config):
        tensors |= {matrix.module + suffix: part for suffix, part in make(random, matrix.out, matrix.into).items()}
        if matrix.module != "lm_head":
            tensors[f"{matrix.module}.bias"] = tensor(random.normal(0, 0.2, matrix.out).astype(np.float16), "F16")
    write(directory / "model.safetensors", tensors)
    return config
