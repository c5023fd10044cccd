"""Values by method, bit-equal to the functions of those who wrote the formats, or to their formulas in other words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from test_dequantise import IN, OUT, RANDOM, Arrays, halves, same, values_of, words

from tpshard.errors import UnsupportedError

torch = pytest.importorskip("torch", reason="other people's formulas are compared with")


def octets(*shape: int) -> Any:
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


def test_metal_as_transformers_unpacks_it() -> None:
    integration = pytest.importorskip("transformers.integrations.metal_quantization", reason="its function is run")
    weight, scales, biases = words(OUT, IN // 8), halves(OUT, IN // 32), halves(OUT, IN // 32)
    expected = integration._affine_dequantize_tensor(
        torch.from_numpy(weight), torch.from_numpy(scales), torch.from_numpy(biases), 32, 4
    )
    config = {"quant_method": "metal", "bits": 4, "group_size": 32}
    arrays: Arrays = {
        ".weight": ("U32", weight.view(np.uint32)), ".scales": ("F16", scales), ".qbiases": ("F16", biases),
    }  # fmt: skip
    same(values_of(config, arrays), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gemmas_own_as_transformers_unpacks_it(bits: int) -> None:
    integration = pytest.importorskip("transformers.integrations.gemma_quant", reason="its function is run")
    stored, scales = octets(OUT, IN * bits // 8), RANDOM.uniform(0.1, 1, (OUT, 1)).astype(np.float32)
    if bits == 8:
        codes = torch.from_numpy(stored.view(np.int8))
    else:
        codes = getattr(integration, f"_unpack_int{bits}")(torch.from_numpy(stored), IN)
    found = values_of(
        {"quant_method": "gemma"},
        {
            ".weight": ("I8" if bits == 8 else "U8", stored.view(np.int8) if bits == 8 else stored),
            ".weight_scale": ("F32", scales),
        },
        (OUT, IN),  # a byte may hold one value, two or four: only the table tells
    )
    same(found, codes * torch.from_numpy(scales))


def test_int8_as_bitsandbytes_unpacks_it() -> None:
    """``int8_vectorwise_dequant``: ``A * stats.view(-1, 1) * 7.874015718698502e-3``."""
    codes, stats = octets(OUT, IN).view(np.int8), RANDOM.uniform(0.1, 9, OUT).astype(np.float32)
    expected = torch.from_numpy(codes) * torch.from_numpy(stats).view(-1, 1) * 7.874015718698502e-3
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    same(values_of(config, {".weight": ("I8", codes), ".SCB": ("F32", stats)}), expected)


@pytest.mark.parametrize("packing, less", [("auto_round:auto_gptq", 1), ("auto_round", 0)])
def test_zero_points_of_auto_round(packing: str, less: int) -> None:
    """``qlinear_torch_zp.py`` stores zero points less one, as AutoGPTQ does, and ``qlinear_torch.py`` as they are."""
    codes, zeros = RANDOM.integers(0, 16, (IN, OUT)), RANDOM.integers(1, 16, (IN // 16, OUT))
    scales = halves(IN // 16, OUT)
    shifts = 4 * np.arange(8)

    def packed(values: Any, axis: int) -> Any:
        parts = np.moveaxis(values, axis, -1).reshape(*np.moveaxis(values, axis, -1).shape[:-1], -1, 8)
        return np.moveaxis((parts.astype(np.int64) << shifts).sum(-1).astype(np.uint32).view(np.int32), -1, axis)

    config = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "packing_format": packing}
    arrays: Arrays = {
        ".qweight": ("I32", packed(codes, 0)), ".qzeros": ("I32", packed(zeros - less, 1)), ".scales": ("F16", scales),
    }  # fmt: skip
    expected = (codes - zeros.repeat(16, 0)) * scales.astype(np.float32).repeat(16, 0)
    same(values_of(config, arrays), expected.T)


def test_int4_as_modelopt_packs_it() -> None:
    """``pack_int4_in_uint8``: two consecutive outputs a byte in two's complement; ``pre_quant_scale`` is of inputs."""
    codes = RANDOM.integers(-8, 8, (OUT, IN)).astype(np.int8)
    pairs = codes.T.reshape(IN, OUT // 2, 2)
    packed = ((pairs[..., 0] & 0x0F) | ((pairs[..., 1] & 0x0F) << 4)).T.astype(np.uint8)
    scales, smooth = (RANDOM.uniform(0.1, 1, shape).astype(np.float32) for shape in ((OUT, IN // 16), (IN,)))
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 16}
    arrays: Arrays = {
        ".weight": ("U8", np.ascontiguousarray(packed)), ".weight_scale": ("F32", scales),
        ".pre_quant_scale": ("F32", smooth),
    }  # fmt: skip
    same(values_of(config, arrays), codes * scales.repeat(16, 1) * smooth)
    arrays[".weight_scale_2"] = "F32", np.ones((), np.float32)  # W4A8: another formula
    with pytest.raises(UnsupportedError, match=r"m\.weight is int4 in groups of 16: no formula"):
        values_of(config, arrays)


def test_ternary_weights_of_bitnet() -> None:
    """``AutoBitLinear.forward`` multiplies what comes out by ``weight_scale``."""
    weight, scale = RANDOM.integers(-1, 2, (OUT, IN)).astype(np.float32), np.array([0.37], np.float32)
    config = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    same(values_of(config, {".weight": ("F32", weight), ".weight_scale": ("F32", scale)}), weight * scale)


def test_torchaos_bytes_and_zero_points() -> None:
    """``_dequantize_affine_no_dtype_check``: (input - zero_point) * scale."""
    codes, zeros = octets(OUT, IN).view(np.int8), octets(OUT, IN // 16).view(np.int8)
    scales = RANDOM.uniform(0.1, 1, zeros.shape).astype(np.float32)
    inner = {"granularity": {"_type": "PerGroup", "_data": {"group_size": 16}}}
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": inner}}}
    arrays: Arrays = {
        "._weight_qdata": ("I8", codes), "._weight_scale": ("F32", scales), "._weight_zero_point": ("I8", zeros),
    }  # fmt: skip
    same(values_of(config, arrays), (codes.astype(np.float32) - zeros.repeat(16, 1)) * scales.repeat(16, 1))


def test_a_method_without_a_formula_says_why() -> None:
    arrays: Arrays = {
        ".codes": ("U8", octets(OUT, IN // 8, 1)), ".codebooks": ("F16", halves(1, 256, 1, 8)),
        ".scales": ("F16", halves(OUT, 1, 1, 1)),
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"m\.weight is AQLM.*codebook.*verify by bytes and plan"):
        values_of(json.loads('{"quant_method": "aqlm"}'), arrays)
