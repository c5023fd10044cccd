"""Which formula a method has for its formats, and from where; None where none is known here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tpshard.config import Config

from .formats import Format
from .methods import method_of
from .values import FLOAT4, OFFSET, SIGNED, Formula

NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # of AWQ's words: which output each four bits are of, lowest first

_FP8 = (
    "deepseek-ai/DeepSeek-V3 inference/kernel.py (weight_dequant_kernel: x.to(float32) * s); transformers "
    "integrations/finegrained_fp8.py (Fp8Dequantize), integrations/fbgemm_fp8.py"
)
_GPTQ = "AutoGPTQ nn_modules/qlinear/qlinear_cuda_old.py (forward) and GPTQModel nn_modules/qlinear/__init__.py"
_AWQ = "AutoAWQ awq/utils/packing_utils.py (dequantize_gemm, AWQ_REVERSE_ORDER)"
_COMPRESSED = (
    "compressed-tensors quantization/lifecycle/forward.py (_dequantize), compressors: pack_quantized.py "
    "(unpack_from_int32), nvfp4_quantized.py (unpack_fp4_from_uint8)"
)
_MXFP4 = "transformers integrations/mxfp4.py (convert_moe_packed_tensors); OCP Microscaling Formats 1.0, 5.3.3"
_MODELOPT = "NVIDIA/TensorRT-Model-Optimizer modelopt/torch/quantization/qtensor/nvfp4_tensor.py, fp8_tensor.py"
_AUTOROUND = "intel/auto-round auto_round_extension/torch/qlinear_torch_zp.py (auto_gptq: less one), qlinear_torch.py"
_BNB = "bitsandbytes _ops.py (int8_vectorwise_dequant: A * stats * 7.874e-3)"
_BNB4 = "bitsandbytes backends/default/ops.py (_dequantize_blockwise_compute), functional.py (dequantize_4bit)"
_BITNET = "transformers integrations/bitnet.py (AutoBitLinear.forward: linear(x, weight) * weight_scale)"
_METAL = "transformers integrations/metal_quantization.py (_affine_dequantize_tensor)"
_GEMMA = "transformers integrations/gemma_quant.py (_unpack_int4, _unpack_int2, QuantizedLinear._dequantize_weights)"
_TORCHAO = (
    "pytorch/ao quantization/quant_primitives.py (_dequantize_affine_no_dtype_check, _dequantize_affine_float8); int4: "
    "pytorch/FBGEMM quantize int4_row_quantize_zp"
)
_INT4 = "NVIDIA/TensorRT-Model-Optimizer modelopt/torch/export/quant_utils.py (pack_int4_in_uint8)"
_QUARK = "AMD Quark documentation, Exporting to Hugging Face format: (quantised - zero point) * scale"


def why_unknown(quantisation: Mapping[str, Any]) -> str:
    """Why there is no formula for a method or a variant of it."""
    return UNKNOWN.get(method_of(quantisation).lower(), "no formula of this variant's values is known here")


def formula_of(quantisation: Mapping[str, Any], fmt: Format) -> Formula | None:
    """The formula of a format, by the ``quantization_config`` that declares its method."""
    found = _BY_METHOD.get(method_of(quantisation).lower())
    return None if found is None else found(Config(quantisation), fmt)


def _is_packed(fmt: Format) -> bool:
    return fmt.members[0].kind == "packed"


def _fp8(c: Config, fmt: Format) -> Formula:
    return Formula(codes=FLOAT4, source=_MXFP4) if _is_packed(fmt) else Formula(source=_FP8)


def _gptq(c: Config, fmt: Format) -> Formula:
    layout = str(c.get("checkpoint_format", "format", default="gptq")).lower()
    return Formula(zero=0 if layout == "gptq_v2" else 1, middle=True, source=_GPTQ)


def _awq(c: Config, fmt: Format) -> Formula | None:
    if c.count("bits", "w_bit", default=4) != 4:
        return None
    woven = str(c.get("version", "format", default="gemm")).lower() == "gemm"
    return Formula(order=NIBBLES if woven else (), source=_AWQ)


def _compressed(c: Config, fmt: Format) -> Formula:
    if not _is_packed(fmt):
        return Formula(source=_COMPRESSED)
    if fmt.name.startswith("int"):
        return Formula(codes=OFFSET, source=_COMPRESSED)
    return Formula(codes=FLOAT4, globals={".weight_global_scale": -1}, source=_COMPRESSED)


def _autoround(c: Config, fmt: Format) -> Formula | None:
    packing = str(c.get("packing_format", "backend", default="auto_round"))
    if "awq" in packing:
        return _awq(c, fmt)
    if "llm_compressor" in packing:
        return _compressed(c, fmt)
    if "fp8" in packing:
        return _fp8(c, fmt)
    return Formula(zero=1 if "gptq" in packing else 0, middle=True, source=_AUTOROUND)


def _bitsandbytes(c: Config, fmt: Format) -> Formula:
    if not _is_packed(fmt):
        return Formula(factor=7.874015718698502e-3, source=_BNB)
    return Formula(source=_BNB4)


def _bitnet(c: Config, fmt: Format) -> Formula:
    return Formula(source=_BITNET)


def _affine(c: Config, fmt: Format) -> Formula:
    if c.get("quant_method") == "gemma":
        return Formula(codes=OFFSET, source=_GEMMA)
    return Formula(added=True, source=_METAL)


def _torchao(c: Config, fmt: Format) -> Formula:
    return Formula(codes=SIGNED, added=True, source=_TORCHAO) if _is_packed(fmt) else Formula(source=_TORCHAO)


def _mxfp4(c: Config, fmt: Format) -> Formula:
    return Formula(codes=FLOAT4, source=_MXFP4)


def _modelopt(c: Config, fmt: Format) -> Formula | None:
    if fmt.name.startswith("int"):  # what a scale an input (pre_quant_scale) does to what comes in, it does to weights
        return Formula(codes=SIGNED, unless=frozenset({".weight_scale_2"}), source=_INT4)
    scales = dict.fromkeys((".weight_scale_2", "_weight_scale_2"), 1)
    return Formula(codes=FLOAT4, globals=scales, source=_MODELOPT) if _is_packed(fmt) else Formula(source=_MODELOPT)


def _quark(c: Config, fmt: Format) -> Formula:
    return Formula(codes=FLOAT4, source=_MXFP4) if _is_packed(fmt) else Formula(source=_QUARK)


_BY_METHOD: Mapping[str, Callable[[Config, Format], Formula | None]] = {
    "fp8": _fp8, "mxfp8": _fp8, "fbgemm_fp8": _fp8, "gptq": _gptq, "gptqmodel": _gptq, "awq": _awq,
    "compressed-tensors": _compressed, "compressed_tensors": _compressed, "mxfp4": _mxfp4, "modelopt": _modelopt,
    "modelopt_fp4": _modelopt, "modelopt_mixed": _modelopt, "modelopt_mxfp8": _modelopt, "quark": _quark,
    "auto-round": _autoround, "auto_round": _autoround, "intel/auto-round": _autoround, "bitsandbytes": _bitsandbytes,
    "bitsandbytes_8bit": _bitsandbytes, "bitsandbytes_4bit": _bitsandbytes, "bitnet": _bitnet, "metal": _affine,
    "gemma": _affine, "torchao": _torchao,
}  # fmt: skip
DEQUANTISED = tuple(_BY_METHOD)
"""The methods that have a formula here."""
UNKNOWN: Mapping[str, str] = {
    "aqlm": "its values are sums of codebook vectors, and no reference says in which precision they are added up",
    "fp_quant": "its values are those of a matrix that was rotated in groups, and its kernels rotate what comes in",
}
"""Methods without one, and why."""
