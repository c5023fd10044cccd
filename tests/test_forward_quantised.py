"""Level *forward* on quantised shards: ranks run on the values of what they store, and what is wrong with it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantschemes import AWQ_ORDER, bits_of, values_of
from quantweights import METHODS, write_llama
from weights import Tensor, header_of, read, tensor, write

import tpshard
from tpshard.shards import open_shards
from tpshard.source import open_source

pytest.importorskip("torch", reason="ranks are run as a model")
transformers = pytest.importorskip("transformers", reason="ranks are run as a model")

LAYER = "model.layers.0"
DOWN, UP, OUTPUT = f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.up_proj", f"{LAYER}.self_attn.o_proj"
Change = Callable[[Any, Any], Any]
"""Given a rank's stored tensor and rank 0's of the same name, as arrays of codes, what is planted."""


def split(directory: Path, method: str, tp_size: int) -> Path:
    write_llama(directory / "source", method)
    tpshard.split(directory / "source", directory / "shards", tp_size)
    return directory / "shards"


def forward(directory: Path) -> Any:
    report = tpshard.verify(directory / "shards", against=directory / "source", levels=["forward"])
    return next(verdict for verdict in report.verdicts if verdict.level == "forward")


def rank_file(shards: Path, rank: int) -> Path:
    return sorted(shards.glob("*.safetensors"))[rank]


def plant(shards: Path, rank: int, name: str, change: Change) -> None:
    """Change the bytes of a tensor of one rank and nothing else; no level that runs here reads digests."""
    path = rank_file(shards, rank)
    stored, first = read(path)[name], read(rank_file(shards, 0))[name]
    planted = np.ascontiguousarray(change(stored.array.copy(), first.array))
    assert planted.shape == stored.shape
    assert planted.tobytes() != stored.data, "the mutant is the original"
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    begin, end = header_of(path)[name]["data_offsets"]
    raw[start + begin : start + end] = planted.astype(stored.array.dtype).tobytes()
    path.write_bytes(raw)


@pytest.mark.parametrize("tp_size", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_compute_what_the_source_computes(method: str, tp_size: int, tmp_path: Path) -> None:
    split(tmp_path, method, 2 if method == "nf4" else tp_size)  # two runs of 32 a row
    verdict = forward(tmp_path)
    assert verdict.verdict == "passed", verdict.findings or verdict.notes
    assert verdict.coverage == 1
    assert any("values of what each rank stores" in note for note in verdict.notes)
    assert max(measure.error for measure in verdict.measures) < 1e-12


@pytest.mark.parametrize("method", ["gptq", "fp8-blocks", "nf4"])
def test_values_run_as_the_quantised_checkpoint(method: str, tmp_path: Path) -> None:
    """Shards that --dequantize made, at a degree that groups may forbid, against what they were made of."""
    write_llama(tmp_path / "source", method)
    tpshard.split(tmp_path / "source", tmp_path / "shards", 4, dequantize="bf16")
    verdict = forward(tmp_path)
    assert verdict.verdict == "passed", verdict.findings or verdict.notes
    assert any("as their values in BF16" in note for note in verdict.notes)
    name = f"{DOWN}.weight"
    plant(tmp_path / "shards", 1, name, lambda stored, first: np.roll(stored, 1, 0))
    verdict = forward(tmp_path)
    assert verdict.verdict == "failed"
    assert any("down_proj" in finding.message for finding in verdict.findings)


# -- mutants ----------------------------------------------------------------------------------------


def zeros_of_others(stored: Any, first: Any) -> Any:
    """Zero points one too large, as where version 1 is read as version 2."""
    return stored + 0x11111111


def shifted(stored: Any, first: Any) -> Any:
    return np.roll(stored, 1, 0)


def shifted_columns(stored: Any, first: Any) -> Any:
    return np.roll(stored, 1, 1)


def of_rank_0(stored: Any, first: Any) -> Any:
    return first


def ascending(stored: Any, first: Any) -> Any:
    """AWQ's words with their numbers in ascending order."""
    found = values_of(stored, 4, stored.shape[1] * 8).reshape(len(stored), -1, 8)
    return bits_of(found[..., np.argsort(AWQ_ORDER)].reshape(len(stored), -1), 4, 32)


def halves_swapped(stored: Any, first: Any) -> Any:
    """The two numbers of every byte in the other order."""
    codes = stored.view(np.uint8)
    return ((codes >> 4) | (codes << 4)).astype(np.uint8).view(stored.dtype).reshape(stored.shape)


def from_zero(stored: Any, first: Any) -> Any:
    """Groups that count from the rank's own first input."""
    return stored - stored.min()


def one_further(stored: Any, first: Any) -> Any:
    """An order of inputs whose groups count from one."""
    return (stored + 1) % (stored.max() + 1)


def blocks_swapped(stored: Any, first: Any) -> Any:
    stored[:16], stored[16:32] = stored[16:32].copy(), stored[:16].copy()
    return stored


def columns_swapped(stored: Any, first: Any) -> Any:
    stored[:, [0, -1]] = stored[:, [-1, 0]]
    return stored


MUTANTS: dict[str, tuple[str, str, Change]] = {
    "gptq: zero points": ("gptq", f"{UP}.qzeros", zeros_of_others),
    "gptq: zero points, row-parallel": ("gptq", f"{DOWN}.qzeros", zeros_of_others),
    "gptq: rows of scales": ("gptq", f"{UP}.scales", shifted),
    "gptq: rows of scales, row-parallel": ("gptq", f"{DOWN}.scales", shifted),
    "gptq: scales of another rank": ("gptq", f"{DOWN}.scales", of_rank_0),
    "gptq: scales of another rank, column-parallel": ("gptq", f"{UP}.scales", of_rank_0),
    "gptq: nibbles": ("gptq", f"{OUTPUT}.qweight", halves_swapped),
    "gptq: base of g_idx": ("gptq", f"{DOWN}.g_idx", from_zero),
    "gptq: base of g_idx, attention": ("gptq", f"{OUTPUT}.g_idx", from_zero),
    "gptq: words of another rank": ("gptq", f"{DOWN}.qweight", of_rank_0),
    "gptq in order: base of g_idx": ("gptq-order", f"{DOWN}.g_idx", one_further),
    "gptq in order: g_idx of another rank": ("gptq-order", f"{DOWN}.g_idx", of_rank_0),
    "gptq in order: rows of scales": ("gptq-order", f"{DOWN}.scales", shifted),
    "gptq in order: zero points": ("gptq-order", f"{OUTPUT}.qzeros", zeros_of_others),
    "awq: zero points": ("awq", f"{UP}.qzeros", zeros_of_others),
    "awq: rows of scales": ("awq", f"{DOWN}.scales", shifted),
    "awq: nibbles": ("awq", f"{UP}.qweight", ascending),
    "awq: nibbles of zero points": ("awq", f"{DOWN}.qzeros", ascending),
    "awq: scales of another rank": ("awq", f"{DOWN}.scales", of_rank_0),
    "fp8: rows of scales": ("fp8-blocks", f"{UP}.weight_scale_inv", shifted),
    "fp8: columns of scales": ("fp8-blocks", f"{DOWN}.weight_scale_inv", shifted_columns),
    "fp8: scales of another rank": ("fp8-blocks", f"{DOWN}.weight_scale_inv", of_rank_0),
    "fp8: blocks": ("fp8-blocks", f"{UP}.weight", blocks_swapped),
    "fp8: scales of outputs": ("fp8-outputs", f"{UP}.weight_scale", shifted),
    "fp8: scales of outputs of another rank": ("fp8-outputs", f"{UP}.weight_scale", of_rank_0),
    "nvfp4: nibbles": ("nvfp4", f"{DOWN}.weight_packed", halves_swapped),
    "nvfp4: columns of scales": ("nvfp4", f"{DOWN}.weight_scale", columns_swapped),
    "compressed: zero points": ("compressed", f"{UP}.weight_zero_point", zeros_of_others),
    "compressed: zero points of another rank": ("compressed", f"{DOWN}.weight_zero_point", of_rank_0),
    "compressed: columns of scales": ("compressed", f"{DOWN}.weight_scale", shifted_columns),
    "compressed: nibbles": ("compressed", f"{OUTPUT}.weight_packed", halves_swapped),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_wrong_on_one_rank_is_named(mutant: str, tmp_path: Path) -> None:
    method, name, change = MUTANTS[mutant]
    shards = split(tmp_path, method, 2)
    plant(shards, 1, name, change)
    verdict = forward(tmp_path)
    assert verdict.verdict == "failed"
    block = name.rpartition(".")[0].rpartition(".")[0]  # up_proj shows where the block's sum is taken
    assert any(block in finding.message for finding in verdict.findings), verdict.findings


def test_a_config_that_reads_the_ranks_otherwise(tmp_path: Path) -> None:
    """Version 2 of GPTQ in the shards' config: the same bytes, and other zero points."""
    shards = split(tmp_path, "gptq", 2)
    path = shards / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    path.write_text(json.dumps(config))
    from tpshard.numerics.forward import forward as run_forward

    verdict = run_forward(open_shards(shards), open_source(tmp_path / "source"))
    assert verdict.verdict == "failed"
    assert any("differs from the original" in finding.message for finding in verdict.findings)


def test_the_other_levels_say_what_they_run_on(tmp_path: Path) -> None:
    shards = split(tmp_path, "gptq", 2)
    report = tpshard.verify(shards, against=tmp_path / "source", levels=["twin", "backward", "runtime"])
    found = {verdict.level: verdict for verdict in report.verdicts}
    assert found["twin"].verdict == found["backward"].verdict == "passed"
    assert "twin" in found["backward"].ran_on
    assert "quantised" in found["backward"].ran_on
    assert found["runtime"].verdict == "unsupported"
    assert "'forward'" in found["runtime"].notes[0]


# -- banks of experts -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose experts are in MXFP4."""
    from tpshard.numerics.twin import write_twin

    place = tmp_path_factory.mktemp("mxfp4")
    source, out = place / "plain", place / "source"
    config = transformers.GptOssConfig(
        num_hidden_layers=1, vocab_size=48, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    write_twin({**config.to_dict(), "architectures": ["GptOssForCausalLM"]}, source)
    random = np.random.default_rng(3)
    tensors: dict[str, Tensor] = {}
    for name, stored in read(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")) or len(stored.shape) != 3:
            tensors[name] = stored
            continue
        experts, into, rows = stored.shape
        codes = random.integers(0, 256, (experts, rows, into // 32, 16)).astype(np.uint8)
        tensors[f"{name}_blocks"] = tensor(codes, "U8")
        scales = random.integers(121, 125, (experts, rows, into // 32)).astype(np.uint8)
        tensors[f"{name}_scales"] = tensor(scales, "U8")
    out.mkdir()
    write(out / "model.safetensors", tensors)
    saved = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**saved, "quantization_config": {"quant_method": "mxfp4"}}))
    return out


def test_a_bank_in_mxfp4(bank: Path, tmp_path: Path) -> None:
    tpshard.split(bank, tmp_path / "shards", 2)
    report = tpshard.verify(tmp_path / "shards", against=bank, levels=["forward"])
    assert report.passed, report.findings or [verdict.notes for verdict in report.verdicts]


@pytest.mark.parametrize("name, change", [("gate_up_proj_scales", of_rank_0), ("down_proj_blocks", halves_swapped)])
def test_a_mutant_of_a_bank_in_mxfp4(bank: Path, tmp_path: Path, name: str, change: Change) -> None:
    tpshard.split(bank, tmp_path / "shards", 2)
    plant(tmp_path / "shards", 1, f"{LAYER}.mlp.experts.{name}", change)
    report = tpshard.verify(tmp_path / "shards", against=bank, levels=["forward"])
    assert any(f"{LAYER}.mlp.experts" in finding.message for finding in report.findings), report.verdicts
