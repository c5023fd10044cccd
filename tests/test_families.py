"""Tiny checkpoints of architectures of every kind: cut, joined, re-cut, and run by their ranks against the original.

A sample by default; ``-m slow`` takes every architecture of transformers and the structural variants.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import zoo  # noqa: E402
from zoo.conformance import check  # noqa: E402
from zoo.released import released, write_sparse  # noqa: E402

from tpshard import registry  # noqa: E402
from tpshard.convert import split  # noqa: E402
from tpshard.numerics.forward import run_ranks  # noqa: E402
from tpshard.numerics.ways import ZERO_PAD  # noqa: E402
from tpshard.planrules import plan_verdict  # noqa: E402
from tpshard.registry import families  # noqa: E402
from tpshard.shards import open_shards  # noqa: E402
from tpshard.source import open_source  # noqa: E402
from tpshard.survey import plan  # noqa: E402
from tpshard.verdicts import PASSED  # noqa: E402

SERVED = {model_type for module in families().values() for model_type in module.MODEL_TYPES}
LEAST_SHARDED = 0.95

# One of every kind: fusions, latent attention, experts, state spaces, hybrids, encoders, cross attention.
SAMPLE = [
    ("causal", "apertus", ""), ("causal", "bitnet", ""), ("causal", "bloom", ""), ("causal", "codegen", ""),
    ("causal", "cohere", "qknorm"), ("causal", "dbrx", ""), ("causal", "deepseek_v4", ""), ("causal", "diffllama", ""),
    ("causal", "falcon_h1", "g1"), ("causal", "falcon_mamba", ""), ("causal", "flint", ""),
    ("causal", "gemma3n_text", ""), ("causal", "gemma4_text", "keqv"), ("causal", "granitemoehybrid", ""),
    ("causal", "jetmoe", ""), ("causal", "kimi_linear", ""), ("causal", "laguna", ""), ("causal", "lfm2_moe", ""),
    ("causal", "llama4_text", ""), ("causal", "longcat_flash", ""), ("causal", "minimax", ""), ("causal", "mpt", ""),
    ("causal", "qwen3_next", ""), ("causal", "recurrent_gemma", ""), ("causal", "rwkv", ""), ("causal", "xlnet", ""),
    ("causal", "zaya", ""), ("masked", "deberta-v2", ""), ("masked", "modernbert", ""), ("seq2seq", "t5", ""),
    ("seq2seq", "bart", ""), ("vlm", "llava", ""), ("vlm", "qwen2_5_vl", ""), ("speech", "whisper", ""),
]  # fmt: skip
EVERY = [
    (task, model_type, variant)
    for task in zoo.TASKS
    for model_type in zoo.architectures(task)
    if model_type in SERVED
    for variant in ("", *(zoo.variants(model_type) if task == "causal" else ()))
]
NOT_RUN = ("transformers:",)  # what transformers itself cannot make


def name_of(case: tuple[str, str, str]) -> str:
    return "-".join(filter(None, case))


def conforms(case: tuple[str, str, str], directory: Path, degrees: tuple[int, ...], run_at: tuple[int, ...]) -> None:
    task, model_type, variant = case
    out = check(model_type, directory, task=task, variant=variant, degrees=degrees, run_at=run_at)
    if out.unsupported.startswith(NOT_RUN):
        pytest.skip(out.unsupported)
    assert not out.problems
    assert out.unsupported == ""
    assert out.error is not None and out.gate is not None and out.error <= out.gate


@pytest.mark.parametrize("case", SAMPLE, ids=name_of)
def test_a_sample(case: tuple[str, str, str], tmp_path: Path) -> None:
    conforms(case, tmp_path, (2, 3), (3,))


@pytest.mark.parametrize(
    ("task", "model_type", "reached"),
    [
        ("base", "clip", 1.0),  # a scale behind the last point
        ("vlm", "mllama", 1.0),  # an image in tiles
        pytest.param("base", "wav2vec2", 0.99, marks=pytest.mark.slow),  # a table for training, taps past the input
    ],
)
def test_what_the_run_reaches(task: str, model_type: str, reached: float, tmp_path: Path) -> None:
    """Good shards pass as they do for the command, and no more is left unreached than the original's run leaves."""
    out = check(model_type, tmp_path, task=task, degrees=(2,), run_at=(2,))
    assert not out.problems and out.unsupported == ""
    assert out.coverage is not None and out.coverage >= reached


@pytest.mark.parametrize("model_type", ["mamba", "jamba"])
def test_bytes_by_theory_are_those_exchanged(model_type: str, tmp_path: Path) -> None:
    """The sum inside a state-space mixer is as wide as the time step, B and C, and not as the residual stream."""
    zoo.write(model_type, tmp_path / "model")
    split(tmp_path / "model", tmp_path / "shards", 2)
    shards = open_shards(tmp_path / "shards")
    found = run_ranks(shards, open_source(tmp_path / "model"), torch.float64, ZERO_PAD, tokens=12)
    theory = plan_verdict(shards.manifest)
    assert found.verdict == PASSED
    assert theory.collectives == found.collectives
    assert theory.collective_bytes_per_token == found.collective_bytes_per_token


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=name_of)
def test_every_architecture(case: tuple[str, str, str], tmp_path: Path) -> None:
    conforms(case, tmp_path, (1, 2, 3, 4, 5, 8), (2, 3, 8))


def test_every_model_type_leads_to_the_table_that_claims_it() -> None:
    """Also where only the text of the tables is searched for it."""
    assert registry._by_model_type().keys() == SERVED
    for model_type, module in registry._by_model_type().items():
        assert registry._found(model_type) is module
    assert registry._found("no-such-model") is None


def test_every_causal_model_of_transformers_has_a_table() -> None:
    types = {name: transformers.CONFIG_MAPPING[name].model_type for name in zoo.architectures("causal")}
    inside = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}  # what these classes save
    assert [name for name, kind in types.items() if inside.get(name, kind) not in SERVED] == []


RELEASED = ["llama", "phi3", "gpt_oss", "falcon", "qwen3_next", "gemma4_text", "mamba", "bloom"]


@pytest.mark.parametrize("model_type", RELEASED)
def test_released_sizes_are_really_cut(model_type: str, tmp_path: Path) -> None:
    config, shapes = released(model_type)
    survey = plan(write_sparse(tmp_path, config, shapes), [8])
    assert survey.degrees[0].possible, survey.degrees[0].reason
    assert survey.degrees[0].sharded_fraction is not None
    assert survey.degrees[0].sharded_fraction >= LEAST_SHARDED


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(zoo.architectures("causal")) & SERVED - set(RELEASED)))
def test_every_released_size_is_really_cut(model_type: str, tmp_path: Path) -> None:
    test_released_sizes_are_really_cut(model_type, tmp_path)
