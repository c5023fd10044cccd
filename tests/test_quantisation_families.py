"""Quantisation composes with every family's table: plans from names and shapes alone, at every degree, judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from quantschemes import compressed_config
from test_planrules import CONFIGS, LLAMA, names

from tpshard.axes import Dim
from tpshard.degrees import axes_of, largest_degree
from tpshard.layout import cut_layout
from tpshard.matching import Logical, match
from tpshard.plancuts import Planned
from tpshard.planrules import judge
from tpshard.quantisation import formats_of
from tpshard.quantisation.composition import pack
from tpshard.quantisation.unpacking import unpack
from tpshard.registry import table_for
from tpshard.roles import PARTS
from tpshard.table import Rule, template_of

Shapes = dict[str, tuple[str, tuple[int, ...]]]
Store = Callable[[int, int], Shapes]
MADE = {role: part for part in PARTS for role in part.ins | part.outs}
GROUP = 4


def blocks(out: int, into: int) -> Shapes:
    return {".weight": ("F8_E4M3", (out, into)), ".weight_scale_inv": ("F32", (-(-out // GROUP), -(-into // GROUP)))}


def words(out: int, into: int) -> Shapes:
    """GPTQ with 8 bits: four integers a word, groups of four."""
    return {
        ".qweight": ("I32", (into // 4, out)),
        ".qzeros": ("I32", (into // GROUP, out // 4)),
        ".scales": ("F16", (into // GROUP, out)),
        ".g_idx": ("I32", (into,)),
    }


def rows(out: int, into: int) -> Shapes:
    return {".weight": ("I8", (out, into)), ".SCB": ("F32", (out,)), ".weight_format": ("U8", ())}


METHODS: dict[str, tuple[dict[str, Any], Store]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, blocks),
    "gptq": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, words),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, rows),
}


def is_quantised(rule: Rule) -> bool:
    """Whether the tests quantise a rule's matrices: linear layers whose sizes are whole groups."""
    lengths = [dim.extent if isinstance(dim, Dim) else dim for dim in rule.dims]
    linear = rule.name.endswith(".weight") and rule.role in MADE and "conv" not in rule.name
    return linear and len(lengths) == 2 and all(length and length % GROUP == 0 for length in lengths)


def turned(family: str, rule: Rule) -> bool:
    """Whether a family stores its matrices ``[in, out]``."""
    return family == "gpt2" and rule.role in MADE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_takes_every_granule(family: str, method: str) -> None:
    config, (quantised, store) = CONFIGS[family], METHODS[method]
    table, tensors, matrices = table_for(config), [], 0
    shapes: dict[str, tuple[int, ...]] = {}
    others = {block for choice in table.choices for block in choice.blocks[1:]}
    for rule in table.rules:
        if None in rule.dims or rule.optional or rule.block in others:
            continue
        shape = tuple(dim.extent if isinstance(dim, Dim) else dim or 0 for dim in rule.dims)
        for name in names(table, rule.name):
            if rule.layers is not None and template_of(name)[1][0] not in rule.layers:
                continue
            shapes[name] = shape
            if is_quantised(rule):
                matrices += 1
                size = shape[::-1] if turned(family, rule) else shape
                stem = name.removesuffix(".weight")
                tensors += [Logical(stem + suffix, *stored) for suffix, stored in store(*size).items()]
            else:
                tensors.append(Logical(name, "BF16", shape))
    if not matrices:
        pytest.skip("all its matrices are convolutions, which no method here quantises")
    unpacked = unpack(tensors, formats_of(config | {"quantization_config": quantised}), table)
    assert {tensor.name: tensor.shape for tensor in unpacked.tensors} == shapes
    assert len(unpacked.packed) == matrices
    matched, reasons = pack(match(table, unpacked.tensors), unpacked)
    assert all(tensor.name in matched.rules for tensor in tensors)
    axes = axes_of(matched.dims)
    assert reasons.keys() <= axes.keys()
    for degree in range(1, min(largest_degree(axes), 8) + 1):
        layout = cut_layout(tensors, matched.dims, degree)
        plan = {
            stored.name: Planned(
                stored.name, stored.pieces[0].cut.shape, matched.rules[stored.name].role,
                matched.rules[stored.name].note, matched.dims[stored.name], stored.pieces[0].cut.dims,
            )
            for stored in layout.stored
        }  # fmt: skip
        judged = judge(plan, degree, matched.aliases)
        assert not judged.findings, judged.findings
        assert not judged.unjudged
        assert [stored.pieces[0].cut.shape for stored in layout.stored] == [tensor.shape for tensor in tensors]


QWEN3 = {
    "model_type": "qwen3_moe", "num_hidden_layers": 1, "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 3, "intermediate_size": 24,
}  # fmt: skip
GEMMA = CONFIGS["gemma3_text"]
F8, U8 = "F8_E4M3", "U8"
LAYER = "model.layers.0"
# What stands for some matrices, by the first part of its name: suffixes, dtypes, shapes, and the shapes at degree 2.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]]] = {
    "a bank in FP8 blocks": (QWEN3, {"quant_method": "fp8", "weight_block_size": [8, 8]}, {
        f"{LAYER}.mlp.experts.gate_up_proj": (F8, (3, 32, 32), (3, 16, 32)),
        f"{LAYER}.mlp.experts.gate_up_proj_scale_inv": ("F32", (3, 4, 4), (3, 2, 4)),
        f"{LAYER}.mlp.experts.gate_up_proj_activation_scale": ("F32", (3,), (3,)),
        f"{LAYER}.mlp.experts.down_proj": (F8, (3, 32, 16), (3, 32, 8)),
        f"{LAYER}.mlp.experts.down_proj_scale_inv": ("F32", (3, 4, 2), (3, 4, 1)),
    }),
    "a bank in FP8 by rows": (QWEN3, {"quant_method": "fbgemm_fp8"}, {
        f"{LAYER}.mlp.experts.gate_up_proj": (F8, (3, 32, 32), (3, 16, 32)),
        f"{LAYER}.mlp.experts.gate_up_proj_scale": ("F32", (3, 32, 1), (3, 16, 1)),
        f"{LAYER}.mlp.experts.down_proj": (F8, (3, 32, 16), (3, 32, 8)),
        f"{LAYER}.mlp.experts.down_proj_scale": ("F32", (3, 32, 1), (3, 32, 1)),
    }),
    "four-bit floats in a dtype of their own": (LLAMA, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {
        f"{LAYER}.mlp.up_proj.weight": ("F4", (40, 48), (20, 48)),
        f"{LAYER}.mlp.up_proj.weight_scale": (F8, (40, 3), (20, 3)),
        f"{LAYER}.mlp.up_proj.weight_scale_2": ("F32", (), ()),
        f"{LAYER}.mlp.up_proj.input_scale": ("F32", (), ()),
    }),
    "integers with zero points of their own shape": (
        LLAMA,
        compressed_config("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}), {
        f"{LAYER}.mlp.up_proj.weight": ("I8", (40, 48), (20, 48)),
        f"{LAYER}.mlp.up_proj.weight_scale": ("F32", (40, 1), (20, 1)),
        f"{LAYER}.mlp.up_proj.weight_zero_point": ("I8", (40, 1), (20, 1)),
        f"{LAYER}.mlp.down_proj.weight": ("I8", (48, 40), (48, 20)),
        f"{LAYER}.mlp.down_proj.weight_scale": ("F32", (48, 1), (48, 1)),
    }),
    "a quantised embedding": (GEMMA, {"quant_method": "gemma"}, {
        "model.embed_tokens.embedding_quantized": (U8, (101, 24), (51, 24)),
        "model.embed_tokens.embedding_scale": ("F32", (101, 1), (51, 1)),
        f"{LAYER}.mlp.down_proj.weight": (U8, (48, 20), (48, 10)),
        f"{LAYER}.mlp.down_proj.weight_scale": ("F32", (48, 1), (48, 1)),
        f"{LAYER}.mlp.down_proj.input_activation_scale": ("F32", (), ()),
    }),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_what_some_matrices_are_stored_as(case: str) -> None:
    """The other matrices are not quantised."""
    config, quantised, stored = BESIDE[case]
    table = table_for(config)
    stands = {re.sub(r"(\.weight|\.embedding|_scale|_activation|\.input).*", "", name) for name in stored}
    tensors = [Logical(name, dtype, shape) for name, (dtype, shape, _) in stored.items()]
    banks = any(name.endswith("experts.down_proj") for name in stored)
    for rule in table.rules:
        other = rule.block == ("experts" if banks else "stacked experts")
        if None in rule.dims or rule.optional or other or (rule.block == "dense" and banks):
            continue
        shape = tuple(dim.extent if isinstance(dim, Dim) else dim or 0 for dim in rule.dims)
        others = [name for name in names(table, rule.name) if name.removesuffix(".weight") not in stands]
        tensors += [Logical(name, "BF16", shape) for name in others]
    unpacked = unpack(tensors, formats_of(config | {"quantization_config": quantised}), table)
    matched, _ = pack(match(table, unpacked.tensors), unpacked)
    layout = cut_layout(tensors, matched.dims, 2)
    shapes = {piece.name: piece.shape(0) for piece in layout.stored}
    assert {name: shapes[name] for name in stored} == {name: due for name, (_, _, due) in stored.items()}


def test_a_group_that_no_head_honours_is_told_with_all_its_numbers() -> None:
    """Six heads of eight in groups of sixteen: two heads stay together; three groups are all that there is."""
    config = CONFIGS["llama"] | {"head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 32}
    axes = _axes(config, {"quant_method": "fp8", "weight_block_size": [16, 16]}, 16)
    text = next(text for axis, text in axes.items() if axis.name == "heads")
    assert re.search(r"48 indices in 3 groups of 16 that stay whole", text)
    assert largest_degree(axes) == 3


def _axes(config: dict[str, Any], quantised: dict[str, Any], block: int) -> dict[Any, str]:
    table = table_for(config)
    tensors = []
    for rule in table.rules:
        if rule.role == "buffer" or None in rule.dims:
            continue
        shape = tuple(dim.extent if isinstance(dim, Dim) else dim or 0 for dim in rule.dims)
        for name in names(table, rule.name):
            tensors.append(Logical(name, "F8_E4M3" if rule.role in MADE else "BF16", shape))
            if rule.role in MADE:
                scale = tuple(-(-length // block) for length in shape)
                tensors.append(Logical(f"{name}_scale_inv", "F32", scale))
    unpacked = unpack(tensors, formats_of(config | {"quantization_config": quantised}), table)
    matched, reasons = pack(match(table, unpacked.tensors), unpacked)
    return axes_of(matched.dims) | reasons
