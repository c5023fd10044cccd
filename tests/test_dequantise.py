"""The values of quantised matrices: bit-equal to the formulas of those who wrote the formats, for any holder."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from quantmodels import write_quantised
from quantschemes import Scheme, compressed_config
from test_quantisation import BY_NAME, SCHEMES, models, open_or_refused

import tpshard
from tpshard.axes import replicated
from tpshard.checkpoint import open_checkpoint
from tpshard.degrees import axes_of, largest_degree
from tpshard.layout import whole_cut
from tpshard.matching import Logical
from tpshard.openfiles import OpenFiles
from tpshard.quantisation import formats_of
from tpshard.quantisation.formats import Member
from tpshard.quantisation.unpacking import unpack
from tpshard.quantisation.valuecodes import NUMPY, floats, integers, rounded, table
from tpshard.quantisation.valueformulas import DEQUANTISED, formula_of
from tpshard.quantisation.valuereader import BoxReader, extents_of, matrix_of
from tpshard.quantisation.values import Matrix, NoValueError, StoredPart
from tpshard.quantised import quantised
from tpshard.routing import Extent
from tpshard.shards import open_shards
from tpshard.table import Table

torch = pytest.importorskip("torch", reason="its dtypes and other people's formulas are compared with")

Arrays = dict[str, tuple[str, Any]]  # by suffix: safetensors dtype and numpy elements
RANDOM = np.random.default_rng(11)
OUT, IN = 24, 64
FLOAT8 = {
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


# -- numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_code_of_a_float_of_8_bits_is_the_number_that_torch_has(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(getattr(torch, FLOAT8[dtype])).to(torch.float32).numpy()
    assert np.array_equal(table(dtype), expected, equal_nan=True)
    assert np.array_equal(np.signbit(table(dtype))[~np.isnan(expected)], np.signbit(expected)[~np.isnan(expected)])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), st.sampled_from(["BF16", "F16", "F32"]))
@settings(deadline=None)
def test_rounding_is_torchs(codes: list[int], dtype: str) -> None:
    ties = [code & 0xFFFF0000 | 0x8000 for code in codes]  # as near to one as to the other
    values = np.array(codes + ties, np.uint32).view(np.float32)
    names = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    expected = torch.from_numpy(values.copy()).to(names[dtype])
    found = floats(rounded(values, dtype), dtype)
    assert np.array_equal(found, expected.to(torch.float32).numpy(), equal_nan=True)


@given(st.data(), st.sampled_from([2, 3, 4, 8]), st.sampled_from([8, 16, 32, 64]))
@settings(deadline=None)
def test_integers_in_words(data: Any, bits: int, word: int) -> None:
    """Against Python's own integers, gapless in one long number or by word."""
    gapless = data.draw(st.booleans())
    words = data.draw(st.lists(st.integers(0, 2**word - 1), min_size=1, max_size=8))
    words = words[: len(words) // bits * bits] or words * bits if gapless else words
    stored = np.array(words, f"<u{word // 8}").reshape(1, -1, 1)
    number = sum(value << word * n for n, value in enumerate(words))
    if gapless:
        expected = [number >> n * bits & 2**bits - 1 for n in range(len(words) * word // bits)]
    else:
        expected = [value >> n * bits & 2**bits - 1 for value in words for n in range(word // bits)]
    assert integers(stored, bits, 1, gapless=gapless)[0, :, 0].tolist() == expected


# -- formulas -------------------------------------------------------------------------------------------


def matrix_from(
    config: Mapping[str, Any], arrays: Arrays, shape: tuple[int | None, int | None] = (None, None)
) -> tuple[Matrix, Any]:
    """A quantised matrix of a model's table, from tensors in memory, and the function that reads them."""
    name = "experts" if any(suffix.startswith("_") for suffix in arrays) else "m"
    tensors = [Logical(name + suffix, dtype, value.shape) for suffix, (dtype, value) in arrays.items()]
    held = {name + suffix: value for suffix, (_, value) in arrays.items()}
    family = Table(layers=0)
    if name == "experts":
        family.tensor("experts", None, None, None, role="expert_up")
    else:
        family.linear("m", *shape, role="up")
    unpacked = unpack(tensors, formats_of({"quantization_config": config}), family)
    (packed,) = unpacked.packed.values()
    dims = [replicated(length) for length in packed.weight.shape]
    cuts = {tensor.name: whole_cut(tensor.shape) for tensor in tensors}
    matrix = matrix_of(packed, family.rules[0], dims, cuts, 0, config)
    assert matrix is not None

    def read(part: StoredPart, bounds: Any) -> Any:
        return held[part.name][tuple(slice(*pair) for pair in bounds)]

    return matrix, read


def values_of(
    config: Mapping[str, Any], arrays: Arrays, shape: tuple[int | None, int | None] = (None, None)
) -> Any:
    matrix, read = matrix_from(config, arrays, shape)
    return matrix.values({}, read)


def same(found: Any, expected: Any) -> None:
    """Bit for bit but for the sign of zero, where 0 - 0 and 0 x -s have one and tables of codes another."""
    assert found.shape == tuple(expected.shape)
    assert np.array_equal(found, np.asarray(expected, np.float32), equal_nan=True)


def words(*shape: int) -> Any:
    return RANDOM.integers(-(2**31), 2**31, shape).astype(np.int32)


def halves(*shape: int) -> Any:
    return RANDOM.normal(size=shape).astype(np.float16)


def test_gptq_as_autogptq_unpacks_it() -> None:
    """``qlinear_cuda_old.py``, forward with 4 bits, in its own words; in float16 its product is this one, rounded."""
    bits, group = 4, 16
    qweight, qzeros, scales = words(IN // 8, OUT), words(IN // group, OUT // 8), halves(IN // group, OUT)
    g_idx = RANDOM.permutation(np.arange(IN) // group).astype(np.int32)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": True}
    arrays: Arrays = {
        ".qweight": ("I32", qweight), ".qzeros": ("I32", qzeros), ".scales": ("F16", scales), ".g_idx": ("I32", g_idx),
    }  # fmt: skip
    wf = torch.arange(0, 32, bits).unsqueeze(0)
    zeros = torch.bitwise_right_shift(torch.from_numpy(qzeros).unsqueeze(2).expand(-1, -1, 32 // bits), wf.unsqueeze(0))
    zeros = torch.bitwise_and(zeros, 2**bits - 1) + 1
    zeros = zeros.reshape(scales.shape)
    weight = torch.bitwise_right_shift(
        torch.from_numpy(qweight).unsqueeze(1).expand(-1, 32 // bits, -1), wf.unsqueeze(-1)
    )
    weight = torch.bitwise_and(weight, 2**bits - 1).reshape(-1, OUT)
    half = torch.from_numpy(scales)
    index = torch.from_numpy(g_idx).long()
    expected = half.float()[index] * (weight - zeros[index])
    found = values_of(config, arrays)
    same(found, expected.T)
    same(floats(rounded(found, "F16"), "F16"), (half[index] * (weight - zeros[index])).float().T)
    second = values_of({**config, "checkpoint_format": "gptq_v2"}, arrays)
    same(second, (half.float()[index] * (weight - zeros[index] + 1)).T)
    middle = values_of({**config, "sym": True}, {k: v for k, v in arrays.items() if k != ".qzeros"})
    same(middle, (half.float()[index] * (weight - 8)).T)


def test_gptq_with_3_bits_as_autogptq_unpacks_it() -> None:
    """Ten numbers of three bits in a word and a third of an eleventh: ``qlinear_cuda_old.py``, forward with 3 bits."""
    qweight, scales = words(IN // 32 * 3, OUT), halves(1, OUT)
    config = {"quant_method": "gptq", "bits": 3, "group_size": -1}
    wf = torch.tensor([[0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 0], [0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31],
                       [0, 2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 0]], dtype=torch.int32)  # fmt: skip
    weight = torch.from_numpy(qweight).reshape(IN // 32, 3, 1, OUT).expand(-1, -1, 12, -1)
    weight = (weight >> wf.unsqueeze(-1)) & 0x7
    weight[:, 0, 10] = (weight[:, 0, 10] & 0x3) | ((weight[:, 1, 0] << 2) & 0x4)
    weight[:, 1, 11] = (weight[:, 1, 11] & 0x1) | ((weight[:, 2, 0] << 1) & 0x6)
    weight = torch.cat([weight[:, 0, :11], weight[:, 1, 1:12], weight[:, 2, 1:11]], dim=1).reshape(IN, OUT)
    found = values_of(config, {".qweight": ("I32", qweight), ".scales": ("F16", scales)})
    same(found, (torch.from_numpy(scales).float() * (weight - 4)).T)


def test_awq_as_autoawq_unpacks_it() -> None:
    """``awq/utils/packing_utils.py``: unpack_awq, reverse_awq_order, dequantize_gemm."""
    group, reverse = 16, [0, 4, 1, 5, 2, 6, 3, 7]
    qweight, qzeros, scales = words(IN, OUT // 8), words(IN // group, OUT // 8), halves(IN // group, OUT)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    shifts = torch.arange(0, 32, 4)

    def unpacked(stored: Any) -> Any:
        found = torch.bitwise_right_shift(torch.from_numpy(stored)[:, :, None], shifts[None, None, :]).to(torch.int8)
        order = torch.arange(stored.shape[1] * 8).view(-1, 8)[:, reverse].reshape(-1)
        return torch.bitwise_and(found.view(len(stored), -1)[:, order], 0x0F)

    wide = torch.from_numpy(scales).float().repeat_interleave(group, dim=0)
    expected = (unpacked(qweight) - unpacked(qzeros).repeat_interleave(group, dim=0)) * wide
    arrays: Arrays = {".qweight": ("I32", qweight), ".qzeros": ("I32", qzeros), ".scales": ("F16", scales)}
    same(values_of(config, arrays), expected.T)


@pytest.mark.parametrize("rows, columns", [(8, 16), (7, 20), (1, 64)])
def test_fp8_in_blocks_as_deepseek_unpacks_it(rows: int, columns: int) -> None:
    """``inference/kernel.py``: a block's float32 scale times its values as float32, stored in bfloat16."""
    weight = RANDOM.integers(0, 256, (OUT, IN)).astype(np.uint8)
    scales = RANDOM.uniform(0.1, 3, (-(-OUT // rows), -(-IN // columns))).astype(np.float32)
    x = torch.from_numpy(weight).view(torch.float8_e4m3fn)
    y = torch.empty(OUT, IN, dtype=torch.bfloat16)
    for m in range(0, OUT, rows):
        for n in range(0, IN, columns):
            s = torch.tensor(scales[m // rows, n // columns])
            y[m : m + rows, n : n + columns] = x[m : m + rows, n : n + columns].to(torch.float32) * s
    config = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    found = values_of(config, {".weight": ("F8_E4M3", weight), ".weight_scale_inv": ("F32", scales)})
    same(floats(rounded(found, "BF16"), "BF16"), y.float().numpy())


@pytest.mark.parametrize("shape", [(), (1,), (OUT,), (OUT, 1)])
def test_fp8_with_one_scale_or_one_an_output(shape: tuple[int, ...]) -> None:
    weight = RANDOM.integers(0, 256, (OUT, IN)).astype(np.uint8)
    scales = np.asarray(RANDOM.uniform(0.1, 3, shape), np.float32)
    found = values_of({"quant_method": "fp8"}, {".weight": ("F8_E5M2", weight), ".weight_scale": ("F32", scales)})
    expected = torch.from_numpy(weight).view(torch.float8_e5m2).float().numpy()
    same(found, expected * (scales.reshape(-1, 1) if scales.size > 1 else scales.reshape(-1)))


def test_mxfp4_as_transformers_unpacks_it() -> None:
    pytest.importorskip("transformers", reason="its own function is run")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = RANDOM.integers(0, 256, (3, OUT, 2, 16)).astype(np.uint8)
    scales = RANDOM.integers(100, 150, (3, OUT, 2)).astype(np.uint8)
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    found = values_of({"quant_method": "mxfp4"}, {"_blocks": ("U8", blocks), "_scales": ("U8", scales)})
    same(found.transpose(0, 2, 1), expected)


def nibbles(packed: Any) -> Any:
    """``unpack_fp4_from_uint8`` of compressed-tensors: the low half first, the sign in the highest of four bits."""
    flat = packed.flatten()
    low_high = np.stack([flat & 0x0F, (flat & 0xF0) >> 4], 1).flatten()
    found = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)[low_high & 7]
    return np.where(low_high & 8, -found, found).reshape(packed.shape[0], -1).astype(np.float32)


def test_nvfp4_as_its_two_writers_unpack_it() -> None:
    """compressed-tensors divides the groups' scales by the global one (``_dequantize``), ModelOpt multiplies."""
    packed = RANDOM.integers(0, 256, (OUT, IN // 2)).astype(np.uint8)
    scales = RANDOM.integers(1, 120, (OUT, IN // 16)).astype(np.uint8)
    whole = np.array([3.7], np.float32)
    of_group = torch.from_numpy(scales).view(torch.float8_e4m3fn).float()
    args = {"num_bits": 4, "type": "float", "group_size": 16}
    found = values_of(
        compressed_config("nvfp4-pack-quantized", args),
        {
            ".weight_packed": ("U8", packed), ".weight_scale": ("F8_E4M3", scales),
            ".weight_global_scale": ("F32", whole),
        },
    )  # fmt: skip
    wide = (of_group / torch.from_numpy(whole)).repeat_interleave(16, 1).numpy()
    same(found, nibbles(packed) * wide)
    found = values_of(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {".weight": ("U8", packed), ".weight_scale": ("F8_E4M3", scales), ".weight_scale_2": ("F32", whole)},
    )
    same(found, nibbles(packed) * (of_group * torch.from_numpy(whole)).repeat_interleave(16, 1).numpy())


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_of_compressed_tensors(bits: int) -> None:
    """``unpack_from_int32`` takes half of the range off again; zero points are packed along the outputs."""
    group, each = 16, 32 // bits
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": group}
    packed, zeros = words(OUT, IN // each), words(OUT // each, IN // group)
    scale = torch.from_numpy(RANDOM.normal(size=(OUT, IN // group))).to(torch.bfloat16)

    def unpacked(stored: Any, dim: int) -> Any:
        out = np.zeros([n * each if d == dim else n for d, n in enumerate(stored.shape)], np.int64)
        for i in range(each):
            found = (stored >> (bits * i)) & (2**bits - 1)
            if dim:
                out[:, i::each] = found
            else:
                out[i::each] = found
        return out - 2 ** (bits - 1)

    difference = unpacked(packed, 1) - np.repeat(unpacked(zeros, 0), group, 1)
    expected = torch.from_numpy(difference).to(torch.bfloat16) * scale.repeat_interleave(group, 1)
    found = values_of(
        compressed_config("pack-quantized", weights),
        {
            ".weight_packed": ("I32", packed), ".weight_scale": ("BF16", scale.view(torch.uint16).numpy()),
            ".weight_zero_point": ("I32", zeros), ".weight_shape": ("I64", np.array([OUT, IN])),
        },
    )  # fmt: skip
    if bits == 4:  # a difference of 8 bits has 9, which bfloat16 rounds before it multiplies; here nothing is
        same(floats(rounded(found, "BF16"), "BF16"), expected.float().numpy())
    same(found, difference.astype(np.float32) * scale.repeat_interleave(group, 1).float().numpy())


def test_every_formula_names_its_source() -> None:
    for scheme in SCHEMES:
        if scheme.config["quant_method"] in DEQUANTISED:
            for fmt in formats_of({"quantization_config": scheme.config}):
                found = formula_of(scheme.config, fmt)
                assert found is None or ".py" in found.source or "documentation" in found.source


def test_an_order_that_names_a_group_that_is_not_there() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}
    order = np.full(IN, 4, np.int32)
    arrays: Arrays = {
        ".qweight": ("I32", words(IN // 8, OUT)), ".scales": ("F16", halves(IN // 16, OUT)), ".g_idx": ("I32", order),
    }  # fmt: skip
    with pytest.raises(NoValueError, match=r"m.g_idx names group 4.*0-3"):
        values_of(config, arrays)


# -- holders and windows --------------------------------------------------------------------------------

KNOWN = [scheme.name for scheme in SCHEMES if scheme.config["quant_method"] in DEQUANTISED]
# The readers of other schemes make codes and not numbers, or reckon in float64.
READ_EXACTLY = ("gptq", "awq", "gemv", "ct-int4", "ct-int8-32", "nf4", "bitnet")


@pytest.mark.parametrize("name", KNOWN)
@given(data=st.data())
@settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate],
          suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_ranks_values_are_its_slice_of_the_wholes(
    name: str, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scheme: Scheme = BY_NAME[name]
    model = data.draw(models(scheme))
    tmp_path = tmp_path_factory.mktemp("ranks")
    own = write_quantised(tmp_path / "source", model, scheme, seed=data.draw(st.integers(0, 9)))
    tp_size = data.draw(st.integers(1, min(3, largest_degree(open_or_refused(tmp_path / "source")))))
    source = open_checkpoint(tmp_path / "source")
    tpshard.split(tmp_path / "source", tmp_path / "out", tp_size)
    shards = open_shards(tmp_path / "out")
    config, axes = source.source.config, axes_of(shards.manifest.dims)
    whole, cut = quantised(config, source.tensors), quantised(config, shards.manifest.tensors, axes=axes)
    assert whole is not None and cut is not None
    assert len(cut.packed) == len(own)
    files = OpenFiles([source.source.root / file.name for file in source.source.files], [False])
    read = BoxReader(files.read, extents_of(source.placed, 0))
    values = {name: matrix.values({}, read) for name, matrix in whole.matrices(source.placed, 0).items()}
    if name.startswith(READ_EXACTLY) and scheme.config.get("checkpoint_format") != "gptq_v2":
        for module, expected in own.items():
            found = values[f"{module}.weight"]
            same(found.T if model["model_type"] == "gpt2" else found, expected)
    ranks = OpenFiles(shards.paths(), [False] * tp_size)
    for rank in range(tp_size):
        read = BoxReader(ranks.read, extents_of(shards.placed, rank))
        for of, matrix in cut.matrices(shards.placed, rank).items():
            found = matrix.values({}, read)
            held = [dim_indices(dim, tp_size, rank) for dim in cut.dims[of]]
            kept = [indices >= 0 for indices in held]
            due = values[of][np.ix_(*(i[k] for i, k in zip(held, kept, strict=True)))]
            assert np.array_equal(found[np.ix_(*kept)], due, equal_nan=True)
            first = data.draw(st.integers(0, matrix.shape[0] - 1))
            last = data.draw(st.integers(first + 1, matrix.shape[0]))
            assert np.array_equal(matrix.rows(first, last, read), found[first:last], equal_nan=True)
            assert np.array_equal(matrix.rows(first, last, read, "BF16"), rounded(found[first:last], "BF16"))
            window = {}
            for dim, length in matrix.lengths.items():
                low = data.draw(st.integers(0, length - 1))
                window[dim] = low, data.draw(st.integers(low + 1, length))
            box = found[tuple(slice(*window[dim]) for dim in matrix.order)]
            assert np.array_equal(matrix.values(window, read), box, equal_nan=True)
    files.close()
    ranks.close()


def dim_indices(dim: Any, tp_size: int, rank: int) -> Any:
    """Which indices of a dimension a rank stores, in order; -1 for padding."""
    from tpshard.partition import partition

    runs = partition(dim, tp_size).ranks[rank]
    parts = [np.arange(start, start + length) if start >= 0 else np.full(length, -1) for start, length in runs]
    return np.concatenate(parts) if parts else np.zeros(0, int)


@given(st.data(), st.lists(st.integers(1, 9), max_size=4), st.sampled_from(["U8", "F16", "I32", "F64"]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_box_of_a_stored_tensor(tmp_path: Path, data: Any, shape: list[int], dtype: str) -> None:
    kind = np.dtype(NUMPY[dtype])
    held = np.frombuffer(RANDOM.bytes(prod(shape) * kind.itemsize), kind).reshape(shape)
    (tmp_path / "file").write_bytes(b"before" + held.tobytes() + b"behind")
    low = [data.draw(st.integers(0, length - 1)) for length in shape]
    bounds = tuple((a, data.draw(st.integers(a + 1, length))) for a, length in zip(low, shape, strict=True))
    files = OpenFiles([tmp_path / "file"], [False])
    part = StoredPart("x", Member("", "scale", ()), (), dtype, tuple(shape))
    found = BoxReader(files.read, {"x": Extent("x", 0, 6, held.nbytes)})(part, bounds)
    files.close()
    assert found.dtype == kind
    assert found.tobytes() == held[tuple(slice(*pair) for pair in bounds)].tobytes()
