"""Quantised checkpoints that were reported or are easily got wrong: cases H17 to H19, fused parts, banks, KV scales."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ok, refused
from cuts import change_config, cut
from quantmodels import llama, parts_of, require_slices, write_quantised
from quantschemes import (
    Scheme,
    awq,
    codes,
    compressed_config,
    compressed_packed,
    gptq,
    in_shape,
    modelopt_awq,
    nf4,
    scales,
)
from weights import Tensor, ranks, read, tensor, tree, write

import tpshard
from tpshard.plancuts import planned
from tpshard.planrules import judge
from tpshard.shards import read_manifest

Case = Callable[[str], Path]
SMALL = llama(4, 2, 16, 64, 32, 40)
DOWN = "model.layers.0.mlp.down_proj"
RANDOM = np.random.default_rng(5)


# -- H17: AWQ groups ----------------------------------------------------------------------------------


def test_h17_groups_that_no_equal_cut_keeps_whole(case: Case, tmp_path: Path) -> None:
    source = case("F-AWQ")
    numbers = ("proj.", 192, 64, "3 groups", "1, 3")
    refused(3, "split", source, tmp_path / "even", "--tp", 2, "--even", says=numbers)
    refused(3, "split", source, tmp_path / "six", "--tp", 6, says=numbers)
    done = cut(source, tmp_path, 2)
    done.holds(f"{DOWN}.qweight", "0-127", "128-191")
    done.holds("model.layers.0.self_attn.q_proj.scales", "0-127", "128-191", axis=1)


def test_h17_whole_groups_on_every_rank(case: Case, tmp_path: Path) -> None:
    done = cut(case("F-AWQ"), tmp_path, 3)
    done.holds(f"{DOWN}.qweight", "0-63", "64-127", "128-191")
    for name in ("qzeros", "scales"):
        done.holds(f"{DOWN}.{name}", "0", "1", "2")
    gate = "model.layers.0.mlp.gate_proj"
    for name in ("qweight", "qzeros"):
        done.holds(f"{gate}.{name}", "0-7", "8-15", "16-23", axis=1)
    done.holds(f"{gate}.scales", "0-63", "64-127", "128-191", axis=1)


# -- H18: GPTQ in the order of activations --------------------------------------------------------------


def test_h18_an_order_of_inputs(case: Case, tmp_path: Path) -> None:
    done = cut(case("F-GPTQ"), tmp_path, 2)
    done.holds(f"{DOWN}.qweight", "0-7", "8-15")
    done.holds(f"{DOWN}.g_idx", "0-63", "64-127")
    done.whole(f"{DOWN}.scales", f"{DOWN}.qzeros")
    up = "model.layers.0.mlp.up_proj"
    done.whole(f"{up}.g_idx")
    done.holds(f"{up}.qzeros", "0-7", "8-15", axis=1)
    done.holds(f"{up}.scales", "0-63", "64-127", axis=1)
    notes = read_manifest(done.directory).notes
    assert "whole" in notes[f"{DOWN}.scales"].text
    assert not notes[f"{up}.scales"].text


def test_h18_without_an_order_scales_are_cut(case: Case, tmp_path: Path) -> None:
    done = cut(case("F-GPTQ-PLAIN"), tmp_path, 2)
    for name in ("qzeros", "scales"):
        done.holds(f"{DOWN}.{name}", "0-3", "4-7")
    assert "subtract" in read_manifest(done.directory).notes[f"{DOWN}.g_idx"].text


# -- H19: FP8 blocks -----------------------------------------------------------------------------------


def test_h19_blocks_with_a_short_last_one(case: Case, tmp_path: Path) -> None:
    source = case("F-FP8")
    done = cut(source, tmp_path, 2)
    layer = "model.layers.0"
    for name in ("gate", "up"):
        done.holds(f"{layer}.mlp.{name}_proj.weight", "0-47", "48-95")
        done.holds(f"{layer}.mlp.{name}_proj.weight_scale_inv", "0-2", "3-5")
    done.holds(f"{DOWN}.weight", "0-47", "48-95", axis=1)
    done.holds(f"{DOWN}.weight_scale_inv", "0-2", "3-5", axis=1)
    for name, rows, blocks in (
        ("q_b", ("0-47", "48-95"), ("0-2", "3-5")),
        ("kv_b", ("0-63", "64-127"), ("0-3", "4-7")),
    ):
        done.holds(f"{layer}.self_attn.{name}_proj.weight", *rows)
        done.holds(f"{layer}.self_attn.{name}_proj.weight_scale_inv", *blocks)
    done.whole(f"{layer}.self_attn.kv_a_proj_with_mqa.weight_scale_inv")
    assert done.source[f"{layer}.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape[0] == 3
    for flags in ((), ("--even",)):
        refused(3, "split", source, tmp_path / "four", "--tp", 4, *flags, says=("q_b_proj", "96", "16", "1, 2"))


# -- fused matrices and banks ---------------------------------------------------------------------------


def phi3(directory: Path, scale: tuple[int, ...], ffn: int = 64, **quantised: Any) -> Path:
    """Phi-3 in FP8: q, k, v in one matrix, gate and up in another, scales of one shape for both or for neither."""
    config = {
        "model_type": "phi3", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": ffn, "num_hidden_layers": 1, "vocab_size": 40, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", **quantised},
    }  # fmt: skip
    layer, block = "model.layers.0", quantised.get("weight_block_size")
    tensors: dict[str, Tensor] = {}
    for name, shape, parts in (
        ("self_attn.qkv_proj", (64, 32), 3), ("self_attn.o_proj", (32, 32), 1),
        ("mlp.gate_up_proj", (2 * ffn, 32), 2), ("mlp.down_proj", (32, ffn), 1),
    ):  # fmt: skip
        tensors[f"{layer}.{name}.weight"] = codes(RANDOM, "F8_E4M3", *shape)
        of_parts = (parts, *scale[1:]) if parts > 1 else (1,)
        found = tuple(-(-n // size) for n, size in zip(shape, block, strict=True)) if block else of_parts
        tensors[f"{layer}.{name}.weight_scale_inv"] = scales(RANDOM, *found)
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = scales(RANDOM, 40, 32)
    for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"):
        tensors[f"{name}.weight"] = scales(RANDOM, 32)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write(directory / "model.safetensors", tensors)
    return directory


def test_a_scale_for_every_part_of_a_fused_matrix_is_whole(tmp_path: Path) -> None:
    done = cut(phi3(tmp_path / "phi", (0,)), tmp_path, 2)
    for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        done.whole(f"model.layers.0.{name}.weight_scale_inv")
    done.holds("model.layers.0.mlp.gate_up_proj.weight", "0-31 64-95", "32-63 96-127")


def test_blocks_that_lie_across_fused_parts_allow_one_degree(tmp_path: Path) -> None:
    source = phi3(tmp_path / "phi", (0,), 44, weight_block_size=[8, 16])
    reason = refused(3, "split", source, tmp_path / "out", "--tp", 2, says=("gate_up_proj.weight_scale_inv", "44", "8"))
    assert re.search(r"degrees 1 to 1\b", reason)
    assert json.loads(ok("inspect", source, "--json").out)
    cut(source, tmp_path, 1)


def gpt_oss(directory: Path) -> Path:
    config = {
        "model_type": "gpt_oss", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
        "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 40, "num_local_experts": 3,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }  # fmt: skip
    layer = "model.layers.0"
    shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
    tensors = {f"{layer}.self_attn.{n}_proj.weight": scales(RANDOM, *shape) for n, shape in shapes.items()}
    tensors |= {f"{layer}.self_attn.{n}_proj.bias": scales(RANDOM, shape[0]) for n, shape in shapes.items()}
    bank = f"{layer}.mlp.experts"
    tensors |= {
        f"{layer}.self_attn.sinks": scales(RANDOM, 8),
        f"{layer}.mlp.router.weight": scales(RANDOM, 3, 64), f"{layer}.mlp.router.bias": scales(RANDOM, 3),
        f"{bank}.gate_up_proj_blocks": codes(RANDOM, "U8", 3, 256, 2, 16),
        f"{bank}.gate_up_proj_scales": codes(RANDOM, "U8", 3, 256, 2),
        f"{bank}.gate_up_proj_bias": tensor(np.tile(np.arange(256, dtype=np.float32), (3, 1)), "F32"),
        f"{bank}.down_proj_blocks": codes(RANDOM, "U8", 3, 64, 4, 16),
        f"{bank}.down_proj_scales": codes(RANDOM, "U8", 3, 64, 4),
        f"{bank}.down_proj_bias": scales(RANDOM, 3, 64),
    }  # fmt: skip
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = scales(RANDOM, 40, 64)
    for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"):
        tensors[f"{name}.weight"] = scales(RANDOM, 64)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write(directory / "model.safetensors", tensors)
    return directory


@pytest.mark.parametrize(("degree", "channels"), [(2, ("0-63", "64-127")), (3, ("0-63", "64-95", "96-127"))])
def test_a_bank_in_mxfp4_is_cut_by_whole_groups(degree: int, channels: tuple[str, ...], tmp_path: Path) -> None:
    """Its blocks have the outputs first, where the model's own bank has the inputs first."""
    done = cut(gpt_oss(tmp_path / "oss"), tmp_path, degree)
    bank = "model.layers.0.mlp.experts"
    pairs = [[int(n) for n in held.split("-")] for held in channels]
    rows = [f"{2 * first}-{2 * last + 1}" for first, last in pairs]
    for name in ("blocks", "scales", "bias"):
        done.holds(f"{bank}.gate_up_proj_{name}", *rows, axis=1)
    groups = [f"{first // 32}-{last // 32}" for first, last in pairs]
    for name in ("blocks", "scales"):
        done.holds(f"{bank}.down_proj_{name}", *groups, axis=2)
    verdict = tpshard.verify(done.directory)
    assert verdict.passed
    refused(3, "split", tmp_path / "oss", tmp_path / "five", "--tp", 5, says=("128", "32", "4 groups", "1, 2"))


# -- beside the matrices -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale"])
@pytest.mark.parametrize(("shape", "cut_along"), [((), None), ((1,), None), ((2,), 0), ((1, 2, 1), 1)])
def test_kv_cache_scales(place: str, shape: tuple[int, ...], cut_along: int | None, tmp_path: Path) -> None:
    scheme = in_shape("fp8", {"quant_method": "fp8"}, "F8_E4M3", ".weight_scale", shape="one")
    name = f"model.layers.0.{place}"
    write_quantised(tmp_path / "source", SMALL, scheme, extra={name: scales(RANDOM, *shape)})
    done = cut(tmp_path / "source", tmp_path, 2)
    if cut_along is None:
        done.whole(name)
    else:
        done.holds(name, "0", "1", axis=cut_along)
    assert tpshard.verify(done.directory).passed


def test_kv_cache_scales_of_no_known_shape_are_refused(tmp_path: Path) -> None:
    scheme = in_shape("fp8", {"quant_method": "fp8"}, "F8_E4M3", ".weight_scale", shape="one")
    extra = {"model.layers.0.self_attn.k_scale": scales(RANDOM, 7)}
    write_quantised(tmp_path / "source", SMALL, scheme, extra=extra)
    refused(3, "split", tmp_path / "source", tmp_path / "out", "--tp", 2, says=("k_scale", "[7]", 2))


def test_modules_that_are_not_quantised_are_cut_as_ever(tmp_path: Path) -> None:
    write_quantised(tmp_path / "source", SMALL, gptq(4, 16), but=("lm_head", "o_proj", "v_proj"))
    done = cut(tmp_path / "source", tmp_path, 2)
    done.holds("model.layers.0.self_attn.v_proj.weight", "0-15", "16-31")
    done.holds("model.layers.0.self_attn.o_proj.weight", "0-31", "32-63", axis=1)


def test_groups_with_schemes_of_their_own(tmp_path: Path) -> None:
    """4 bits in groups of 16 for some modules and 8 in groups of 32 for others: shapes tell which."""
    four, eight = compressed_packed(4, 16), compressed_packed(8, 32)
    groups = [next(iter(scheme.config["config_groups"].values()))["weights"] for scheme in (eight, four)]
    config = compressed_config("pack-quantized", *groups)
    mixed = Scheme(
        "mixed", config,
        lambda random, out, into: (four if into == 32 else eight).store(random, out, into),
        lambda parts, *size: (four if parts[".weight_scale"].shape[1] == size[1] // 16 else eight).read(parts, *size),
    )  # fmt: skip
    values = write_quantised(tmp_path / "source", SMALL, mixed)
    tpshard.split(tmp_path / "source", tmp_path / "out", 2)
    require_slices(SMALL, mixed, values, ranks(tmp_path / "out"))


def test_gptqs_exceptions_have_numbers_of_their_own(tmp_path: Path) -> None:
    four, eight = gptq(4, 16), gptq(8, 32)
    mixed = Scheme(
        "dynamic", {**four.config, "dynamic": {"+:.*proj": {"bits": 8, "group_size": 32}, "-:lm_head": {}}},
        lambda random, out, into: (four if into == 32 else eight).store(random, out, into),
        lambda parts, out, into: (four if parts[".qweight"].shape[0] * 8 == into else eight).read(parts, out, into),
    )  # fmt: skip
    values = write_quantised(tmp_path / "source", SMALL, mixed)
    tpshard.split(tmp_path / "source", tmp_path / "out", 2)
    require_slices(SMALL, mixed, values, ranks(tmp_path / "out"))


def test_four_bits_with_nested_scales_are_cut_by_rows_only(tmp_path: Path) -> None:
    """Runs of scales lie across rows, so that whole rows can be dealt and no inputs."""
    scheme = nf4(64, nested=True)
    config = llama(4, 4, 64, 512, 256, 40)
    rows = ("o_proj", "down_proj", "lm_head")
    values = write_quantised(tmp_path / "source", config, scheme, but=rows)
    tpshard.split(tmp_path / "source", tmp_path / "out", 4)
    held = ranks(tmp_path / "out")
    for rank, tensors in enumerate(held):
        found = scheme.read(parts_of(tensors, "model.layers.0.mlp.up_proj"), 128, 256)
        assert np.array_equal(found, values["model.layers.0.mlp.up_proj"][rank * 128 : rank * 128 + 128])
    write_quantised(tmp_path / "all", config, scheme, but=("lm_head",))
    says = ("nested_absmax", "runs of 16,384", "256", "degrees 1 to 1")
    refused(3, "split", tmp_path / "all", tmp_path / "none", "--tp", 2, says=says)


# -- what is wrong --------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def reshaped(name: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: scales(RANDOM, *shape)})


@pytest.mark.parametrize(
    ("scheme", "change", "status", "says"),
    [
        (gptq(4, 16), without(f"{DOWN}.scales"), 4, (f"{DOWN}.scales", "missing")),
        (gptq(4, 16), without(f"{DOWN}.qweight"), 3, (DOWN, "no rule")),
        (gptq(4, 16), reshaped(f"{DOWN}.scales", 3, 32), 4, (f"{DOWN}.scales", "[3, 32]", "[4, 32]", "[32, 64]")),
        (awq(16), reshaped(f"{DOWN}.qweight", 48, 4), 4, (DOWN, "48", "64")),
        (awq(16), lambda tensors: tensors.update({f"{DOWN}.mystery": scales(RANDOM, 2)}), 3, ("mystery", "no rule")),
    ],
)
def test_what_does_not_belong_together_is_refused(
    scheme: Scheme, change: Callable[[dict[str, Tensor]], object], status: int, says: tuple[str, ...], tmp_path: Path
) -> None:
    write_quantised(tmp_path / "source", SMALL, scheme)
    tensors = read(tmp_path / "source" / "model.safetensors")
    change(tensors)
    write(tmp_path / "source" / "model.safetensors", tensors)
    refused(status, "split", tmp_path / "source", tmp_path / "out", "--tp", 2, says=says)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("config", [7, [], {}, {"quant_method": 4}, {"quant_method": "nobody's"}])
def test_a_config_that_says_nothing_is_refused(config: Any, tmp_path: Path) -> None:
    write_quantised(tmp_path / "source", SMALL, gptq(4, 16))
    change_config(tmp_path / "source", quantization_config=config)
    refused(3 if config == {"quant_method": "nobody's"} else 4, "split", tmp_path / "source", tmp_path / "out",
            "--tp", 2, says=("quant",))  # fmt: skip


# -- the level plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scales", "qzeros", "qweight"])
def test_the_plan_sees_what_drifts_apart(name: str, tmp_path: Path) -> None:
    """Scales, zero points or integers of another rank merge back exactly, and are wrong in every product."""
    write_quantised(tmp_path / "source", SMALL, gptq(4, 16))
    tpshard.split(tmp_path / "source", tmp_path / "out", 2)
    plan = planned(read_manifest(tmp_path / "out"))
    assert not judge(plan, 2, {}).findings
    for module in (DOWN, "model.layers.0.self_attn.q_proj"):
        tensor = plan[f"{module}.{name}"]
        swapped = tuple(type(part)(part.extent, part.ranks[::-1]) for part in tensor.parts)
        findings = judge({**plan, tensor.name: tensor._replace(parts=swapped)}, 2, {}).findings
        assert any(module in finding.message for finding in findings), (module, name)


def test_modelopts_own_file_says_what_config_json_does_not(tmp_path: Path) -> None:
    """Checkpoints of TensorRT-LLM have hf_quant_config.json alone; shards carry it and are read by it."""
    source = tmp_path / "source"
    scheme = modelopt_awq(16)
    values = write_quantised(source, llama(4, 2, 16, 64, 32, 40), scheme)
    config = json.loads((source / "config.json").read_text())
    declared = config.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(config))
    refused(4, "split", source, tmp_path / "no", "--tp", 2, says=("lm_head.weight", "20 rows", "40"))
    del declared["quant_method"]
    separate = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": declared}
    (source / "hf_quant_config.json").write_text(json.dumps(separate))
    tpshard.split(source, tmp_path / "cut", 2)
    require_slices(config, scheme, values, ranks(tmp_path / "cut"))
    tpshard.merge(tmp_path / "cut", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(source)
    tpshard.merge(tmp_path / "cut", tmp_path / "values", dequantize="bf16")
    assert not (tmp_path / "values" / "hf_quant_config.json").exists()
    separate["producer"] = {"name": "another"}
    (source / "hf_quant_config.json").write_text(json.dumps(separate))
    refused(3, "split", source, tmp_path / "no", "--tp", 2, says=("another", "quant_method"))
