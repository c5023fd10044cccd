"""Quantised checkpoints: a split against ``cp``, and dequantising against numpy's own arithmetic for the same formula.

    python benchmarks/dequantise.py [--mebibytes 256]

Makes GPTQ and FP8 checkpoints of one wide layer in a temporary directory. numpy's time is that of the formula in whole
arrays that lie in memory, reading and writing nothing; ``split --dequantize`` reads, computes, digests and writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tpshard
from tpshard.header import build_header

GROUP = 128
HIDDEN = 2048
RANDOM = np.random.default_rng(0)
Arrays = dict[str, tuple[str, Any]]


def gptq(out: int, into: int) -> Arrays:
    def words(*shape: int) -> Any:
        return RANDOM.integers(-(2**31), 2**31, shape).astype(np.int32)

    return {
        ".qweight": ("I32", words(into // 8, out)),
        ".qzeros": ("I32", words(into // GROUP, out // 8)),
        ".scales": ("F16", RANDOM.uniform(0.01, 0.03, (into // GROUP, out)).astype(np.float16)),
        ".g_idx": ("I32", (np.arange(into) // GROUP).astype(np.int32)),
    }


def gptq_in_numpy(parts: Arrays) -> Any:
    shifts = np.arange(0, 32, 4, dtype=np.int32)
    weight = ((parts[".qweight"][1][:, None, :] >> shifts[:, None]) & 15).reshape(-1, parts[".scales"][1].shape[1])
    zeros = ((parts[".qzeros"][1][:, :, None] >> shifts) & 15).reshape(parts[".scales"][1].shape) + 1
    order = parts[".g_idx"][1]
    return (parts[".scales"][1].astype(np.float32)[order] * (weight - zeros[order])).T


def fp8(out: int, into: int) -> Arrays:
    codes = RANDOM.integers(0, 120, (out, into)).astype(np.uint8)
    scales = RANDOM.uniform(0.1, 1, (out // GROUP, into // GROUP)).astype(np.float32)
    return {".weight": ("F8_E4M3", codes), ".weight_scale_inv": ("F32", scales)}


def fp8_in_numpy(parts: Arrays) -> Any:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7) / 8
    numbers = np.where(exponent > 0, np.ldexp(1 + mantissa, exponent - 7), np.ldexp(mantissa, -6))
    numbers = np.where(code > 127, -numbers, numbers).astype(np.float32)
    return numbers[parts[".weight"][1]] * parts[".weight_scale_inv"][1].repeat(GROUP, 0).repeat(GROUP, 1)


METHODS: dict[str, tuple[dict[str, Any], Callable[[int, int], Arrays], Callable[[Arrays], Any]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, gptq, gptq_in_numpy),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8, fp8_in_numpy),
}


def write_model(directory: Path, method: str, elements: int) -> list[Arrays]:
    """A Llama of one layer whose feed-forward matrices have so many elements in all; returns its matrices."""
    config, make, _ = METHODS[method]
    ffn = max(1, elements // (3 * HIDDEN * 8 * GROUP)) * 8 * GROUP
    heads = HIDDEN // 128
    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": ffn, "vocab_size": 256,
        "tie_word_embeddings": True, "quantization_config": config,
    }  # fmt: skip
    at = "model.layers.0"
    tensors: Arrays = {}
    matrices = []
    sizes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    sizes |= {"mlp.gate_proj": (ffn, HIDDEN), "mlp.up_proj": (ffn, HIDDEN), "mlp.down_proj": (HIDDEN, ffn)}
    for name, (out, into) in sizes.items():
        parts = make(out, into)
        matrices.append(parts)
        tensors |= {f"{at}.{name}{suffix}": part for suffix, part in parts.items()}
    ones = ("F16", np.ones(HIDDEN, np.float16))
    tensors |= dict.fromkeys(
        (f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight", "model.norm.weight"), ones
    )
    tensors["model.embed_tokens.weight"] = "F16", np.ones((256, HIDDEN), np.float16)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(values))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(build_header([(name, dtype, array.shape) for name, (dtype, array) in tensors.items()], None))
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).data)
    return matrices


def fastest(run: Callable[[], Any], times: int = 3) -> float:
    """Seconds of the fastest of some runs."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="of values in bfloat16")
    elements = parser.parse_args().mebibytes << 19
    with tempfile.TemporaryDirectory(prefix="tpshard-bench-") as place:
        for method, (_, _, in_numpy) in METHODS.items():
            root = Path(place) / method
            matrices = write_model(root / "source", method, elements)
            count = sum(in_numpy(parts).size for parts in matrices)

            def cut(root: Path = root, **how: Any) -> None:
                tpshard.split(root / "source", root / "out", 4, options=tpshard.Options(overwrite=True), **how)

            def copy(root: Path = root) -> None:
                shutil.rmtree(root / "copy", ignore_errors=True)
                shutil.copytree(root / "source", root / "copy")

            copied, split = fastest(copy), fastest(cut)
            values = fastest(lambda: cut(dequantize="bf16"), 2)
            formula = fastest(lambda: [in_numpy(parts) for parts in matrices], 2)  # noqa: B023
            print(f"{method}: split in {split:.2f} s, {split / copied:.2f} x cp ({copied:.2f} s)")
            print(
                f"{method}: {count / values / 1e6:.0f} million values a second dequantised and written, "
                f"{formula / values:.2f} x the speed of numpy's formula ({count / formula / 1e6:.0f} million)"
            )


if __name__ == "__main__":
    main()
