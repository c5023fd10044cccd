"""Gradients through the ranks, and the collectives that they take."""

from __future__ import annotations

import json
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
from tpshard.numerics import available, exchange, rankmodel, stages
from tpshard.numerics.backward import backward
from tpshard.numerics.forward import forward
from tpshard.numerics.stages import bytes_needed
from tpshard.outputs.lines import lines
from tpshard.planrules import plan_verdict
from tpshard.shards import open_shards
from tpshard.source import open_source
from tpshard.verdicts import LevelVerdict

made = test_local.made  # the fixture


def run(source: Path, shards: Path, max_memory: int | None = None) -> LevelVerdict:
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
    assert verdict.ran_on == "the model"
    assert verdict.collective_bytes_per_token
    noted = {measure.note for measure in verdict.measures}
    assert {"sharded, on the twin", "sharded, on the model"} <= noted
    for measure in verdict.measures:
        assert measure.kind == "gradient"
        assert measure.error <= measure.gate <= (5e-6 if name in ("olmo2", "mamba2") else 5e-7)
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
    manifest = open_shards(shards).manifest
    whole, part = (bytes_needed(manifest, "local", layers)[0] for layers in (None, 1))
    assert run(source, shards, whole).ran_on == "the model"
    first = run(source, shards, whole - 1)
    assert (first.verdict, first.ran_on) == ("passed", "its first layer of 2")
    assert any("--max-memory" in note for note in first.notes)
    assert {m.note for m in first.measures} >= {"sharded, on the first layer"}
    assert not any(".layers.1." in m.point and "first" in m.note for m in first.measures)
    little = run(source, shards, part - 1)
    assert little.verdict == "passed"
    assert little.ran_on == f"the twin: one layer of the model would take {part:,} bytes, more than the {part - 1:,} " \
        "that are allowed"  # fmt: skip
    alone = backward(open_shards(shards), None)
    assert alone.ran_on == "the twin: no source was given"
    assert {m.note.rpartition(" ")[2] for m in alone.measures if m.note != "the loss"} == {"twin"}


def test_a_large_model_is_run_in_part_by_default(
    made: Callable[[str, int], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By parameters, which is time, and by the memory that can be had; --max-memory overrides both."""
    source, shards = made("llama", 2)
    manifest = open_shards(shards).manifest
    (needed, stored), (_, part) = (bytes_needed(manifest, "local", layers) for layers in (None, 1))
    monkeypatch.setattr(stages, "USUAL", stored - 1)
    first = run(source, shards)
    assert first.ran_on == "its first layer of 2"
    assert any("--max-memory runs more" in note for note in first.notes)
    assert run(source, shards, needed).ran_on == "the model"
    monkeypatch.setattr(stages, "USUAL", part - 1)
    assert f"{part:,} bytes of parameters" in run(source, shards).ran_on
    monkeypatch.setattr(stages, "USUAL", stored)
    monkeypatch.setattr(stages, "available_bytes", lambda: 2 * needed - 2)
    assert run(source, shards).ran_on == "its first layer of 2"


def test_limits_of_the_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = available.available_bytes()
    assert free > 1 << 20
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    monkeypatch.setattr(available, "CGROUP", tmp_path)
    assert available.available_bytes() == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available.available_bytes() > 1 << 20


def test_a_changed_config_shows_on_the_first_layers_too(
    made: Callable[[str, int], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, good = made("llama", 2)
    shards = Path(shutil.copytree(good, tmp_path / "shards"))
    config = json.loads((shards / "config.json").read_text())
    (shards / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    whole = bytes_needed(open_shards(shards).manifest, "local", None)[0]
    verdict = run(source, shards, whole - 1)
    assert (verdict.verdict, verdict.ran_on) == ("failed", "its first layer of 2")


@pytest.mark.parametrize("name", ["llama", "olmo2", "mamba2", "opt-350m", "deepseek_v3", "qwen2_moe"])
def test_all_levels_count_the_same_bytes(name: str, made: Callable[[str, int], tuple[Path, Path]]) -> None:
    """Norms over the ranks, a narrower embedding, shared experts; at 3 ranks the head's rows are uneven."""
    source, shards = made(name, 3)
    plan = plan_verdict(open_shards(shards).manifest)
    forwards = forward(open_shards(shards), open_source(source), min_coverage=0.0)
    backwards = run(source, shards)
    told = {(v.collective_bytes_per_token, v.collective_dtype) for v in (plan, forwards, backwards)}
    assert len(told) == 1 and "F64" in str(told)
    assert plan.collectives == forwards.collectives
    told_lines = "\n".join(lines(backwards))
    assert "passed on the model" in told_lines and "a token forward in F64" in told_lines


def test_gates_follow_the_noise_of_the_original(made: Callable[[str, int], tuple[Path, Path]]) -> None:
    """A model without float32 inside shows the last bits of a float32 checkpoint; one with it does not."""
    fine = [m.gate for m in run(*made("gpt2", 2)).measures if "model" in m.note]
    assert sorted(fine)[len(fine) // 2] == 1e-12
    coarse = [m.gate for m in run(*made("llama", 2)).measures if "model" in m.note]
    assert 1e-9 < sorted(coarse)[len(coarse) // 2] <= 5e-7


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
