"""Which formula a method has for its formats, and from where; None where none is known here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tpshard.config import Config

from .formats import Format
from .methods import method_of
from .values import FLOAT4, OFFSET, Formula

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
_QUARK = "AMD Quark documentation, Exporting to Hugging Face format: (quantised - zero point) * scale"


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


def _mxfp4(c: Config, fmt: Format) -> Formula:
    return Formula(codes=FLOAT4, source=_MXFP4)


def _modelopt(c: Config, fmt: Format) -> Formula | None:
    if fmt.name.startswith("int"):
        return None  # two outputs a byte, and a scale an input besides
    scales = dict.fromkeys((".weight_scale_2", "_weight_scale_2"), 1)
    return Formula(codes=FLOAT4, globals=scales, source=_MODELOPT) if _is_packed(fmt) else Formula(source=_MODELOPT)


def _quark(c: Config, fmt: Format) -> Formula:
    return Formula(codes=FLOAT4, source=_MXFP4) if _is_packed(fmt) else Formula(source=_QUARK)


_BY_METHOD: Mapping[str, Callable[[Config, Format], Formula | None]] = {
    "fp8": _fp8, "mxfp8": _fp8, "fbgemm_fp8": _fp8, "gptq": _gptq, "gptqmodel": _gptq, "awq": _awq,
    "compressed-tensors": _compressed, "compressed_tensors": _compressed, "mxfp4": _mxfp4, "modelopt": _modelopt,
    "modelopt_fp4": _modelopt, "modelopt_mixed": _modelopt, "modelopt_mxfp8": _modelopt, "quark": _quark,
}  # fmt: skip
DEQUANTISED = tuple(_BY_METHOD)
"""The methods that have a formula here."""
