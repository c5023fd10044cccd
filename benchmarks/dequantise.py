"""Quantised checkpoints: a split against ``cp``, and dequantising against numpy's own arithmetic for the same formula.

    python benchmarks/dequantise.py [--mebibytes 256] [--pairs 5] [--method NAME]

Makes FP8, GPTQ, AWQ and MXFP4 checkpoints of one wide layer in a temporary directory. Each figure is the median of the
ratios of pairs that are measured in turn, so that a busy machine slows both. numpy's time is that of the formula in
whole arrays that lie in memory, in float32, one thread, reading and writing nothing; ``split --dequantize`` reads,
computes, rounds to bfloat16, digests and writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


def awq(out: int, into: int) -> Arrays:
    return {
        ".qweight": ("I32", RANDOM.integers(-(2**31), 2**31, (into, out // 8)).astype(np.int32)),
        ".qzeros": ("I32", RANDOM.integers(-(2**31), 2**31, (into // GROUP, out // 8)).astype(np.int32)),
        ".scales": ("F16", RANDOM.uniform(0.01, 0.03, (into // GROUP, out)).astype(np.float16)),
    }


def awq_in_numpy(parts: Arrays) -> Any:
    shifts = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7], np.int32)
    scales = parts[".scales"][1].astype(np.float32)
    weight, zeros = (((parts[n][1][:, :, None] >> shifts) & 15).reshape(-1, scales.shape[1])
                     for n in (".qweight", ".qzeros"))  # fmt: skip
    return ((weight - zeros.repeat(GROUP, 0)) * scales.repeat(GROUP, 0)).T


def mxfp4(out: int, into: int) -> Arrays:
    codes = RANDOM.integers(0, 256, (out, into // 32, 16)).astype(np.uint8)
    return {
        ".weight_blocks": ("U8", codes),
        ".weight_scales": ("U8", RANDOM.integers(110, 140, codes.shape[:2]).astype(np.uint8)),
    }


def mxfp4_in_numpy(parts: Arrays) -> Any:
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([numbers, -numbers])
    codes = parts[".weight_blocks"][1]
    values = np.empty((*codes.shape, 2), np.float32)
    values[..., 0], values[..., 1] = numbers[codes & 15], numbers[codes >> 4]
    exponents = parts[".weight_scales"][1].astype(np.int32) - 127
    return np.ldexp(values.reshape(*codes.shape[:2], 32), exponents[..., None]).reshape(len(codes), -1)


METHODS: dict[str, tuple[dict[str, Any], Callable[[int, int], Arrays], Callable[[Arrays], Any]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, gptq, gptq_in_numpy),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, awq_in_numpy),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4, mxfp4_in_numpy),
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


class Pairs(NamedTuple):
    """Medians over pairs: wall seconds of both sides, and the ratios of wall and of processor time."""

    one: float
    other: float
    wall: float
    cpu: float


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """How long a run takes by the clock, and how much of the processors."""
    began, used = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - used


def paired(one: Callable[[], Any], other: Callable[[], Any], pairs: int) -> Pairs:
    """Both sides in turn, after one run of each that does not count."""
    one(), other()
    found = [(*seconds(one), *seconds(other)) for _ in range(pairs)]
    walls, cpus = [a / b for a, _, b, _ in found], [a / b for _, a, _, b in found]
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    return Pairs(medians[0], medians[2], statistics.median(walls), statistics.median(cpus))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="of values in bfloat16")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--method", choices=METHODS, action="append")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tpshard-bench-") as place:
        for method in arguments.method or METHODS:
            root = Path(place) / method
            matrices = write_model(root / "source", method, arguments.mebibytes << 19)
            in_numpy = METHODS[method][2]
            count = sum(in_numpy(parts).size for parts in matrices)
            options = tpshard.Options(overwrite=True)

            def cut(root: Path = root, options: tpshard.Options = options, **how: Any) -> None:
                tpshard.split(root / "source", root / "out", 4, options=options, **how)

            def copy(root: Path = root) -> None:
                shutil.rmtree(root / "copy", ignore_errors=True)
                shutil.copytree(root / "source", root / "copy")

            def formula(in_numpy: Any = in_numpy, matrices: Any = matrices) -> None:
                for parts in matrices:
                    in_numpy(parts)

            split = paired(cut, copy, arguments.pairs)
            print(
                f"{method}: split {split.one:.2f} s, {split.wall:.2f} x cp ({split.other:.2f} s); {split.cpu:.2f} by "
                "processor time", flush=True,
            )  # fmt: skip
            values = paired(formula, lambda cut=cut: cut(dequantize="bf16"), arguments.pairs)
            print(
                f"{method}: {count / values.other / 1e6:.0f} million values a second dequantised and written, "
                f"{values.wall:.2f} x the speed of numpy's formula ({count / values.one / 1e6:.0f} million); "
                f"{values.cpu:.2f} by processor time", flush=True,
            )  # fmt: skip
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
