"""Quantisation schemes for tests: how each stores a matrix of integers, and what a reader makes of its tensors.

Neither torch nor tpshard. A reader sees the tensors of one rank and the size of its part, and nothing of the whole:
what it makes must be the part of what it makes of the whole. Codes of floats count as integers, which is as good.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from weights import Tensor, tensor

Parts = dict[str, Tensor]
Array = Any
Store = Callable[[Any, int, int], Parts]
Read = Callable[[Parts, int, int], Array]

NUMBERS = {
    "F32": np.float32, "F16": np.float16, "I32": np.int32, "U32": np.uint32, "I8": np.int8, "I16": np.int16,
    "I64": np.int64,
}  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    """How a matrix is stored.

    Args:
        config: the quantization_config.
        store: ``store(random, out, in)`` gives the tensors by suffix.
        read: ``read(tensors, out, in)`` gives the values ``[out, in]``.
        out: what the number of outputs of any matrix must be a multiple of; ``into`` of inputs.
        zeros: whether bytes of zeros read as zeros.
    """

    name: str
    config: Mapping[str, Any]
    store: Store
    read: Read
    out: int = 1
    into: int = 1
    models: tuple[str, ...] = ("llama", "gpt2")
    zeros: bool = True


def numbers(stored: Tensor) -> Array:
    """A tensor as numbers; a float of 8 bits as its code."""
    kind = NUMBERS.get(stored.dtype)
    return stored.array if kind is None else np.frombuffer(stored.data, kind).reshape(stored.shape)


def bits_of(values: Array, bits: int, word: int) -> Array:
    """Integers ``[rows, n]`` without gaps in words, the lowest bits first."""
    stream = (values[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & 1
    stream = stream.reshape(len(values), -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % word)))
    return np.packbits(stream, axis=1, bitorder="little").view(f"<u{word // 8}")


def values_of(words: Array, bits: int, count: int) -> Array:
    """The integers of :func:`bits_of`."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    stream = stream[:, : count * bits].reshape(len(words), count, bits).astype(np.int64)
    return (stream << np.arange(bits)).sum(-1)


def scales(random: Any, *shape: int) -> Tensor:
    return tensor(random.uniform(0.5, 2, shape).astype(np.float32), "F32")


def codes(random: Any, dtype: str, *shape: int) -> Tensor:
    return tensor(random.integers(0, 256, shape).astype(np.uint8), dtype)


def spread(scale: Array, size: int, count: int, axis: int) -> Array:
    """A value a group as one an index."""
    return np.repeat(scale, size, axis).take(np.arange(count), axis)


# -- integers in words --------------------------------------------------------------------------------


def gptq(bits: int, group: int, *, reordered: bool = False, method: str = "gptq", **more: Any) -> Scheme:
    def store(random: Any, out: int, into: int) -> Parts:
        groups = 1 if group == -1 else -(-into // group)
        order = np.arange(into) // (into if group == -1 else group)
        if reordered:
            random.shuffle(order)
        return {
            ".qweight": tensor(bits_of(random.integers(0, 2**bits, (out, into)), bits, 32).T, "I32"),
            ".qzeros": tensor(bits_of(random.integers(0, 2**bits, (groups, out)), bits, 32), "I32"),
            ".scales": scales(random, groups, out),
            ".g_idx": tensor(order.astype(np.int32), "I32"),
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        weight = values_of(parts[".qweight"].array.T, bits, into)
        zeros = values_of(parts[".qzeros"].array, bits, out)
        order = numbers(parts[".g_idx"])
        if not reordered:  # the note in the manifest: groups count from the whole matrix's first
            order = order - order[0]
        return (weight - (zeros[order].T + 1)) * numbers(parts[".scales"])[order].T

    name = f"{method}-{bits}-{group}" + ("-order" if reordered else "")
    config = {"quant_method": method, "bits": bits, "group_size": group, "desc_act": reordered, "sym": False, **more}
    return Scheme(name, config, store, read, 32 if bits == 3 else 32 // bits, max(group, 32))


def awq(group: int) -> Scheme:
    def woven(values: Array) -> Array:
        return bits_of(values.reshape(len(values), -1, 8)[..., AWQ_ORDER].reshape(values.shape), 4, 32)

    def plain(words: Array, count: int) -> Array:
        found = values_of(words, 4, count).reshape(len(words), -1, 8)
        return found[..., np.argsort(AWQ_ORDER)].reshape(len(words), count)

    def store(random: Any, out: int, into: int) -> Parts:
        return {
            ".qweight": tensor(woven(random.integers(0, 16, (into, out))), "I32"),
            ".qzeros": tensor(woven(random.integers(0, 16, (into // group, out))), "I32"),
            ".scales": scales(random, into // group, out),
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        zeros, scale = plain(parts[".qzeros"].array, out), numbers(parts[".scales"])
        weight = plain(parts[".qweight"].array, out) - spread(zeros, group, into, 0)
        return (weight * spread(scale, group, into, 0)).T

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Scheme(f"awq-{group}", config, store, read, 8, group)


def gemv(group: int) -> Scheme:
    words = {32: 4, 64: 2}.get(group, 1)

    def width(into: int) -> int:  # calculate_zeros_width of AutoAWQ
        base = -(-(into // group) // 8)
        return -(-base // words) * words

    def store(random: Any, out: int, into: int) -> Parts:
        return {
            ".qweight": tensor(bits_of(random.integers(0, 16, (out, into)), 4, 32), "I32"),
            ".qzeros": tensor(bits_of(random.integers(0, 16, (out, 8 * width(into))), 4, 32), "I32"),
            ".scales": scales(random, out, 8 * width(into)),
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        assert parts[".qzeros"].shape == (out, width(into)), "the kernel reckons with its own padding"
        zeros = spread(values_of(parts[".qzeros"].array, 4, 8 * width(into)), group, into, 1)
        weight = values_of(parts[".qweight"].array, 4, into) - zeros
        return weight * spread(numbers(parts[".scales"]), group, into, 1)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemv"}
    return Scheme(f"gemv-{group}", config, store, read, 1, group)


def compressed_packed(bits: int, group: int | None, *, reordered: bool = False) -> Scheme:
    """Asymmetric: zero points packed along the outputs."""

    def store(random: Any, out: int, into: int) -> Parts:
        groups = 1 if group is None else into // group
        order = np.arange(into) // (group or into)
        random.shuffle(order)
        more = {".weight_g_idx": tensor(order.astype(np.int32), "I32")} if reordered else {}
        zeros = bits_of(random.integers(0, 2**bits, (groups, out)), bits, 32).T
        return {
            ".weight_packed": tensor(bits_of(random.integers(0, 2**bits, (out, into)), bits, 32), "I32"),
            ".weight_scale": scales(random, out, groups),
            ".weight_zero_point": tensor(zeros, "I32"),
            ".weight_shape": tensor(np.array([out, into], np.int64), "I64"),
            **more,
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        order = numbers(parts[".weight_g_idx"]) if reordered else np.arange(into) // (group or into)
        zeros = values_of(parts[".weight_zero_point"].array.T, bits, out).T[:, order]
        weight = values_of(parts[".weight_packed"].array, bits, into) - zeros
        return weight * numbers(parts[".weight_scale"])[:, order]

    weights = {
        "num_bits": bits, "type": "int", "symmetric": False, "strategy": "group" if group else "channel",
        "group_size": group, "actorder": "group" if reordered else None,
    }  # fmt: skip
    name = f"ct-int{bits}-{group}" + ("-order" if reordered else "")
    config = compressed_config("pack-quantized", weights)
    return Scheme(name, config, store, read, 32 // bits, max(group or 1, 32 // bits))


def compressed_config(layout: str, *groups: Mapping[str, Any]) -> dict[str, Any]:
    named = {f"group_{n}": {"targets": ["Linear"], "weights": weights} for n, weights in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": named, "ignore": []}


def metal(bits: int, group: int) -> Scheme:
    def store(random: Any, out: int, into: int) -> Parts:
        return {
            ".weight": tensor(bits_of(random.integers(0, 2**bits, (out, into)), bits, 32), "U32"),
            ".scales": scales(random, out, into // group),
            ".qbiases": scales(random, out, into // group),
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        weight = values_of(parts[".weight"].array, bits, into)
        scale, bias = (spread(numbers(parts[name]), group, into, 1) for name in (".scales", ".qbiases"))
        return weight * scale + bias

    config = {"quant_method": "metal", "bits": bits, "group_size": group}
    return Scheme(f"metal-{bits}-{group}", config, store, read, 1, max(group, 32))


# -- bytes in the matrix's own shape ------------------------------------------------------------------


def in_shape(
    name: str, config: Mapping[str, Any], dtype: str, scale: str, *, rows: int = 0, columns: int = 0,
    shape: str = "blocks", scale_dtype: str = "F32", out: int = 1, into: int = 1,
    models: tuple[str, ...] = ("llama", "gpt2"), **more: Tensor,
) -> Scheme:  # fmt: skip
    """``weight`` a byte an element, and scales: in blocks of ``rows`` x ``columns`` (0: all), or one line of them."""

    def store(random: Any, out: int, into: int) -> Parts:
        lines = -(-out // (rows or out)), -(-into // (columns or into))
        found = {"line": lines[:1], "one": (1,), "scalar": (), "4d": (lines[0], 1, lines[1], 1)}.get(shape, lines)
        scaled = scales(random, *found) if scale_dtype == "F32" else codes(random, scale_dtype, *found)
        weight = scales(random, out, into) if dtype == "F32" else codes(random, dtype, out, into)
        return {".weight": weight, scale: scaled, **more}

    def read(parts: Parts, out: int, into: int) -> Array:
        found = numbers(parts[scale])
        found = found.reshape(found.shape[0] if found.ndim else 1, -1) if shape != "4d" else found[:, 0, :, 0]
        by_row = spread(found, rows or out, out, 0)
        return numbers(parts[".weight"]) * spread(by_row, columns or into, into, 1).astype(np.float32)

    return Scheme(name, config, store, read, out, into, models)


def fp4(name: str, config: Mapping[str, Any], group: int, suffixes: tuple[str, ...], into: int = 0) -> Scheme:
    """Two values a byte along the inputs, a code as scale a group; further suffixes are one value for all."""
    weight, scale, *once = suffixes

    def store(random: Any, out: int, into: int) -> Parts:
        return {
            weight: codes(random, "U8", out, into // 2),
            scale: codes(random, "F8_E4M3" if group == 16 else "U8", out, into // group),
            **{suffix: scales(random) for suffix in once},
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        found = values_of(parts[weight].array, 4, into) * spread(parts[scale].array.astype(np.float32), group, into, 1)
        return found * np.prod([numbers(parts[suffix]) for suffix in once]) if once else found

    return Scheme(name, config, store, read, 1, into or group)


def modelopt_awq(group: int) -> Scheme:
    """Two consecutive outputs a byte."""

    def store(random: Any, out: int, into: int) -> Parts:
        return {
            ".weight": codes(random, "U8", out // 2, into),
            ".weight_scale": scales(random, out, into // group),
            ".pre_quant_scale": scales(random, into),
            ".input_scale": scales(random),
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        weight = values_of(np.ascontiguousarray(parts[".weight"].array.T), 4, out).T
        return weight * spread(numbers(parts[".weight_scale"]), group, into, 1) * numbers(parts[".pre_quant_scale"])

    config = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": group}
    return Scheme(f"modelopt-awq-{group}", config, store, read, 2, group)


NF4_OFFSET = np.float32(0.0625)
NF4_STATE = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "nested_offset": 0.0625}).encode()


def nf4(run: int, *, nested: bool = False, dtype: str = "U8") -> Scheme:
    """One line of nibbles, high ones first, and one value a run of elements."""
    each = {"U8": 2, "BF16": 4}[dtype]

    def store(random: Any, out: int, into: int) -> Parts:
        line = random.bytes(out * into // 2)
        runs = -(-out * into // run)
        found = {
            ".weight": Tensor(dtype, (out * into // each, 1), line),
            ".weight.absmax": codes(random, "U8", runs) if nested else scales(random, runs),
            ".weight.quant_map": scales(random, 16),
            ".weight.quant_state.bitsandbytes__nf4": tensor(np.frombuffer(NF4_STATE, np.uint8), "U8"),
        }
        if nested:
            found[".weight.nested_absmax"] = scales(random, -(-runs // 256))
            found[".weight.nested_quant_map"] = scales(random, 256)
        return found

    def read(parts: Parts, out: int, into: int) -> Array:
        line = np.frombuffer(parts[".weight"].data, np.uint8)
        values = np.stack([line >> 4, line & 15], 1).reshape(-1)
        absmax = numbers(parts[".weight.absmax"])
        if nested:
            table = numbers(parts[".weight.nested_quant_map"])
            absmax = table[absmax] * spread(numbers(parts[".weight.nested_absmax"]), 256, len(absmax), 0) + NF4_OFFSET
        found = numbers(parts[".weight.quant_map"])[values] * spread(absmax, run, out * into, 0)
        return found.reshape(out, into)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    name = f"nf4-{run}-{dtype}" + ("-nested" if nested else "")
    return Scheme(name, config, store, read, 1, run, zeros=not nested)


def torchao(group: int = 0) -> Scheme:
    """A byte an element, and scales and zero points of outputs or of groups of inputs."""

    def store(random: Any, out: int, into: int) -> Parts:
        lines = (out, into // group if group else 1)
        return {
            "._weight_qdata": codes(random, "I8", out, into),
            "._weight_scale": scales(random, *lines),
            "._weight_zero_point": codes(random, "I8", *lines),
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        size = group or into
        zeros = spread(parts["._weight_zero_point"].array.astype(np.float32), size, into, 1)
        scale = spread(numbers(parts["._weight_scale"]), size, into, 1)
        return (parts["._weight_qdata"].array.astype(np.float32) - zeros) * scale

    kind = "IntxWeightOnlyConfig" if group else "Int8WeightOnlyConfig"
    granularity = {"_type": "PerGroup", "_data": {"group_size": group}} if group else {"_type": "PerRow", "_data": {}}
    quant_type = {"default": {"_type": kind, "_version": 2, "_data": {"granularity": granularity}}}
    config = {"quant_method": "torchao", "quant_type": quant_type}
    return Scheme(f"torchao-{group or 'rows'}", config, store, read, 1, max(group, 1))


def torchao_int4(group: int) -> Scheme:
    """Two values a byte along the inputs; scales and zero points lie with the groups first."""

    def store(random: Any, out: int, into: int) -> Parts:
        return {
            "._weight_qdata": codes(random, "I8", out, into // 2),
            "._weight_scale": scales(random, into // group, out),
            "._weight_zero_point": scales(random, into // group, out),
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        weight = values_of(parts["._weight_qdata"].array.view(np.uint8), 4, into)
        weight = np.where(weight > 7, weight - 16.0, weight).astype(np.float32)
        scale, zero = (spread(numbers(parts[f"._weight_{n}"]).T, group, into, 1) for n in ("scale", "zero_point"))
        return weight * scale + zero

    inner = {"group_size": group, "int4_packing_format": "plain"}
    quant_type = {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": inner}}
    config = {"quant_method": "torchao", "quant_type": quant_type}
    return Scheme(f"torchao-int4-{group}", config, store, read, 1, group)


def aqlm(rows: int, columns: int, books: int) -> Scheme:
    def store(random: Any, out: int, into: int) -> Parts:
        return {
            ".codes": codes(random, "U8", out // rows, into // columns, books),
            ".codebooks": scales(random, books, 256, rows, columns),
            ".scales": scales(random, out // rows, 1, 1, 1),
        }

    def read(parts: Parts, out: int, into: int) -> Array:
        book, code = numbers(parts[".codebooks"]), parts[".codes"].array
        found = sum(book[n][code[..., n]] for n in range(books)) * numbers(parts[".scales"])
        return found.transpose(0, 2, 1, 3).reshape(out, into)

    config = {"quant_method": "aqlm", "in_group_size": columns, "out_group_size": rows, "num_codebooks": books}
    return Scheme(f"aqlm-{rows}-{columns}-{books}", config, store, read, rows, columns)
