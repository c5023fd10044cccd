"""Gradients through the ranks, and the collectives that they take."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the numeric verifier runs models with torch")
pytest.importorskip("transformers", reason="the numeric verifier runs the models of transformers")

import test_local
import tiny_models
import torch

from tpshard.convert import split
from tpshard.numerics import exchange, rankmodel
from tpshard.numerics.backward import backward
from tpshard.shards import open_shards
from tpshard.source import open_source
from tpshard.verdicts import LevelVerdict

made = test_local.made  # the fixture
AMPLE = 1 << 28


def run(source: Path, shards: Path, max_memory: int | None = AMPLE) -> LevelVerdict:
    return backward(open_shards(shards), open_source(source), max_memory=max_memory)


# fmt: off
COLLECTIVES = {  # of two layers: forward all-reduces, backward all-reduces
    "llama": (5, 5), "qwen3": (5, 5), "gpt_neox": (5, 5), "gpt2": (5, 5), "opt": (5, 5), "phi3": (5, 5),
    "gpt_oss": (5, 7),  # the routing weights' gradients are summed too
    "falcon-7b": (5, 3),  # attention and feed-forward take one input: one sum of its gradient
    "deepseek_v3": (6, 8),  # shared experts apart; the latents' gradients
    "olmo2": (9, 9),  # the norms over all heads
    "mamba2": (7, 7), "falcon-rw": (5, 5), "bert": (5, 5),
}
# fmt: on


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_gradients_are_the_slices_of_the_originals(name: str, made: Callable[[str, int], tuple[Path, Path]]) -> None:
    """At 3 ranks, so that nothing divides; on the twin and on the model."""
    verdict = run(*made(name, 3))
    assert verdict.verdict == "passed", verdict.findings[:3]
    assert verdict.mode == ("zero-pad" if name in ("olmo2", "mamba2", "falcon-rw") else "local")
    counts = verdict.collectives
    assert (counts["forward all_reduce"], counts["backward all_reduce"]) == COLLECTIVES[name]
    assert counts["forward all_gather"] == 1
    assert verdict.collective_bytes_per_token
    noted = {measure.note for measure in verdict.measures}
    assert {"sharded, on the twin", "sharded, on the model"} <= noted
    for measure in verdict.measures:
        assert measure.kind == "gradient"
        assert measure.error <= measure.gate <= 1e-5
    parameters = {measure.point for measure in verdict.measures}
    assert any("norm" in point.lower() or "ln_" in point for point in parameters)


def test_copies_of_kv_heads_are_to_be_summed(made: Callable[[str, int], tuple[Path, Path]]) -> None:
    verdict = run(*made("llama", 4))
    assert verdict.verdict == "passed", verdict.findings[:3]
    assert any("one copy alone is off by" in note for note in verdict.notes)


def test_norms_inside_a_block_are_to_be_summed(made: Callable[[str, int], tuple[Path, Path]]) -> None:
    verdict = run(*made("qwen3", 2))
    assert verdict.verdict == "passed", verdict.findings[:3]
    assert any("summed over all ranks (model): k_norm, q_norm" in note for note in verdict.notes)


def test_without_memory_for_the_model_its_first_layers_or_the_twin_are_run(
    made: Callable[[str, int], tuple[Path, Path]],
) -> None:
    source, shards = made("llama", 2)
    alone = run(source, shards, None)
    assert {m.note.rpartition(" ")[2] for m in alone.measures if m.note != "the loss"} == {"twin"}
    assert any("--max-memory" in note for note in alone.notes)
    weights = (source / "model.safetensors").stat().st_size
    part = run(source, shards, int(weights / 8 * 24 * 2 * 0.8))
    assert part.verdict == "passed"
    assert any("first 1 of 2 layers" in note for note in part.notes)
    assert {m.note for m in part.measures} >= {"sharded, on the first 1 layers"}
    assert not any(".layers.1." in m.point and "first" in m.note for m in part.measures)
    little = run(source, shards, 1000)
    assert little.verdict == "passed"
    assert any("on the twin alone" in note for note in little.notes)


def _nothing_entered(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x


def _entered_twice(x: torch.Tensor, group: Any, point: str) -> torch.Tensor:
    return exchange.entered(exchange.entered(x, group, point), group, point)


@pytest.mark.parametrize("fault", [_nothing_entered, _entered_twice])
def test_a_missing_or_doubled_sum_of_gradients_is_seen(
    fault: Any, made: Callable[[str, int], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' runtime itself is at fault, so the twin fails too, and nothing is said of the checkpoint."""
    monkeypatch.setattr(rankmodel, "entered", fault)
    verdict = run(*made("llama", 2))
    assert verdict.verdict == "unsupported"
    assert any("the twin fails" in note for note in verdict.notes)
    assert any(measure.status == "fail" for measure in verdict.measures)


@pytest.mark.parametrize("fault", ["two query heads exchanged", "the last bit of one weight", "a row of the head"])
def test_a_fault_of_the_shards_changes_gradients(
    fault: str, made: Callable[[str, int], tuple[Path, Path]], tmp_path: Path
) -> None:
    name, rank, tensor, change = test_local.FAULTS[fault]
    source, good = made(name, 2)
    shards = Path(shutil.copytree(good, tmp_path / "shards"))
    test_local.replaced(shards, rank, tensor, change)
    verdict = run(source, shards)
    assert verdict.verdict == "failed"
    assert all("on the model" in finding.message or finding.tensor == "loss" for finding in verdict.findings)


def test_a_source_with_nan_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    tiny_models.write("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    split(tmp_path / "model", tmp_path / "shards", 2)
    verdict = run(tmp_path / "model", tmp_path / "shards")
    assert verdict.verdict == "source_nan"
    assert any("model.norm.weight" in note for note in verdict.notes)
