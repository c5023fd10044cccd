"""The forward level on sound shards of every family: it passes at the floor of the arithmetic and covers everything."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models  # noqa: E402
from conftest import Case  # noqa: E402
from damaged import Sharded, flip_lowest_bit, points  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from tpshard.convert import split  # noqa: E402
from tpshard.errors import DamagedError, UnsupportedError, UsageError  # noqa: E402
from tpshard.numerics import require, run  # noqa: E402
from tpshard.numerics.forward import forward  # noqa: E402
from tpshard.shards import open_shards  # noqa: E402
from tpshard.source import open_source  # noqa: E402
from tpshard.verdicts import LevelVerdict  # noqa: E402

FLOOR = 1e-14  # fp64, teacher forced, on models this small
SHORT = 4  # tokens, as many as an image of the tiny gemma3 takes: none is left for text, so no image is given
LANGUAGE = [name for name in tiny_models.MODELS if name != "gemma3"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``tiny(name)``: a tiny checkpoint of a family in bfloat16."""
    directory = tmp_path_factory.mktemp("tiny")

    def get(name: str) -> Path:
        if not (directory / name).exists():
            model = tiny_models.build(name)
            model.to(torch.bfloat16).save_pretrained(directory / name)
        return directory / name

    return get


def sound(verdict: LevelVerdict) -> None:
    assert verdict.verdict == "passed", [f.message for f in verdict.findings]
    assert verdict.findings == []
    assert verdict.measures
    for measure in verdict.measures:
        assert measure.status == "pass"
        assert measure.error <= FLOOR, measure
        assert math.isfinite(measure.max_abs)


@pytest.mark.parametrize("name", LANGUAGE)
def test_sound_shards_pass(name: str, tiny: Any, tmp_path: Path) -> None:
    verdict = Sharded(tiny(name), tmp_path, 3).verify()
    sound(verdict)
    assert verdict.coverage == 1.0
    assert verdict.unreached == []
    assert verdict.logits["top1"] == verdict.logits["top5"] == 1.0
    assert verdict.logits["rel_l2"] < 1e-12
    kinds = {measure.kind for measure in verdict.measures}
    assert {"sum", "probe", "rows", "logits"} <= kinds


@pytest.mark.parametrize(
    "name", ["F-LLAMA6", "F-LLAMA8", "F-NEOX", "F-Q3MOE", "F-GPTOSS", "F-MAMBA2", "F-V101", "F-TIED"]
)
def test_the_highest_degree(name: str, case: Case, tmp_path: Path) -> None:
    sound(Sharded(case(name), tmp_path, {"F-LLAMA6": 6, "F-LLAMA8": 8, "F-MAMBA2": 8}.get(name, 4)).verify())


def test_one_rank(case: Case, tmp_path: Path) -> None:
    sound(Sharded(case("F-LLAMA6"), tmp_path, 1).verify())


@pytest.mark.parametrize(("name", "sums"), [("F-LLAMA6", 2 * 2 + 1), ("F-GPT2", 2 * 2 + 1), ("F-DSV3", 2 * 2 + 1 + 1)])
def test_collectives_are_those_of_theory(name: str, sums: int, case: Case, tmp_path: Path) -> None:
    """Two sums a layer, one for the embedding, one gather for the head; a shared expert sums on its own."""
    verdict = Sharded(case(name), tmp_path, 2).verify()
    assert verdict.collectives == {"all_reduce": sums, "all_gather": 1}
    config = json.loads((case(name) / "config.json").read_text())
    hidden = config.get("hidden_size") or config["n_embd"]
    assert verdict.collective_bytes_per_token == 4 * (sums * hidden + config["vocab_size"])


def test_a_run_is_deterministic(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-Q3MOE"), tmp_path, 3)
    first, second = shards.verify(seed=5), shards.verify(seed=5)
    assert first.measures == second.measures
    assert first.logits == second.logits


@pytest.mark.parametrize("compute", ["fp32", "native"])
def test_narrower_arithmetic(compute: str, tiny: Any, tmp_path: Path) -> None:
    verdict = Sharded(tiny("llama"), tmp_path, 2).verify(compute=compute)
    assert verdict.verdict == "passed", [f.message for f in verdict.findings]
    errors = [m.error for m in verdict.measures if m.kind == "sum"]
    assert max(errors) > 1e-9  # it did run in that dtype


def test_a_head_on_disk_counts_though_the_config_ties(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-LLAMA8")
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    shards = Sharded(source, tmp_path, 2)
    sound(shards.verify())
    shards.change(1, "lm_head.weight", lambda value: value * 1.01)
    assert "lm_head" in [finding.tensor for finding in shards.verify().findings]


def test_a_source_with_nan_is_neither_pass_nor_mismatch(case: Case, tmp_path: Path) -> None:
    verdict = Sharded(case("F-MIX"), tmp_path, 2).verify()
    assert verdict.verdict == "source_nan"
    assert verdict.findings == []
    assert "gate_proj" in verdict.notes[-1]
    assert not [m for m in verdict.measures if m.status == "fail"]


@pytest.mark.parametrize("damaged", ["before", "after"])
def test_what_is_finite_in_a_source_with_nan_is_judged(damaged: str, doctored: Case, tmp_path: Path) -> None:
    """A NaN in one layer hides no fault in the layers before and behind it."""
    source = doctored("F-LLAMA6")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = math.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    shards = Sharded(source, tmp_path, 3)
    verdict = shards.verify()
    assert verdict.verdict == "source_nan"
    assert verdict.findings == []
    assert all(math.isfinite(m.error) and m.status == "pass" for m in verdict.measures)
    assert {"model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"} <= {m.point for m in verdict.measures}
    name = {"before": "model.layers.0.self_attn.o_proj", "after": "model.layers.1.mlp.down_proj"}[damaged]
    shards.change(1, f"{name}.weight", flip_lowest_bit(0, 0))
    verdict = shards.verify()
    assert verdict.verdict == "failed"
    assert points(verdict) == [name]
    assert "the source itself holds NaN" in verdict.notes[-1]


def test_nan_in_a_rank_alone_is_a_mismatch_whatever_the_source_holds(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-LLAMA6")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = math.inf
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    shards = Sharded(source, tmp_path, 3)
    shards.change(2, "model.layers.1.self_attn.v_proj.weight", lambda value: value * math.nan)
    verdict = shards.verify()
    assert verdict.verdict == "failed"
    assert points(verdict)[0] == "model.layers.1.self_attn.o_proj"


def test_shards_of_another_model_are_refused(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-LLAMA6"), tmp_path, 2)
    with pytest.raises(DamagedError, match="not of this source"):
        forward(open_shards(shards.root), open_source(case("F-LLAMA8")))


def test_what_the_original_does_not_reach_is_said_and_compared_by_bytes(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text too short for an image leaves the vision tower unrun: that is said, and fails only where it was asked."""
    shards = Sharded(tiny("gemma3"), tmp_path, 2)
    monkeypatch.setattr(run, "MOST_PICTURED", 0)  # the text is not made longer for an image
    verdict = shards.verify(tokens=SHORT)
    sound(verdict)
    assert verdict.coverage is not None
    assert 0.5 < verdict.coverage < 1
    assert all("vision" in name or "multi_modal" in name for name in verdict.unreached)
    (note,) = [note for note in verdict.notes if "unreached" in note]
    assert "elements of the parameters (" in note and "not run: model.vision_tower (" in note
    asked = shards.verify(tokens=SHORT, min_coverage=1.0)
    assert asked.verdict == "failed" and "did not reach" in asked.findings[0].message
    sound(shards.verify(tokens=SHORT, min_coverage=0.7))
    name = next(name for name in verdict.unreached if "vision" in name)
    shards.change(1, name, lambda value: value * 2)
    for least in (None, 0.7):
        wrong = shards.verify(tokens=SHORT, min_coverage=least)
        assert [finding.tensor for finding in wrong.findings] == [name.rpartition(".")[0]]


def test_the_cut_of_what_is_not_reached_is_judged_by_plan(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes merge back whatever the cut; a tower whose heads are parted is wrong though no run comes to it."""
    from tpshard.axes import Dim, Units
    from tpshard.converters import paligemma

    right = paligemma.table

    def parted(config: Any) -> Any:
        table = right(config)
        width = next(rule.dims[1] for rule in table.rules if rule.name.endswith("out_proj.weight"))
        assert isinstance(width, Dim)
        numbers = Units("parted", width.extent).each()
        table.rules[:] = [
            rule._replace(dims=(rule.dims[0], numbers))
            if rule.name.endswith("out_proj.weight")
            else rule
            for rule in table.rules
        ]
        return table

    monkeypatch.setattr(paligemma, "table", parted)
    shards = Sharded(tiny("gemma3"), tmp_path, 3)
    monkeypatch.setattr(run, "MOST_PICTURED", 0)
    verdict = shards.verify(tokens=SHORT)
    assert verdict.verdict == "failed"
    assert {measure.status for measure in verdict.measures} == {"pass"}  # neither bytes nor numbers see it
    assert all("not reached by the run, and by plan" in finding.message for finding in verdict.findings)


@pytest.mark.parametrize("bias", ["k", "q"])
def test_a_rank_must_use_what_the_original_uses(bias: str, tmp_path: Path) -> None:
    """What is added to all keys alike changes no number, and yet a rank that leaves it out is not the same model."""
    tiny_models.write("llama-biases", tmp_path / "model")
    shards = Sharded(tmp_path / "model", tmp_path, 2)
    sound(shards.verify())
    shards.configure(attention_bias=False)
    said = {f.tensor for f in shards.verify().findings if "the original's run uses it" in f.message}
    assert f"model.layers.0.self_attn.{bias}_proj.bias" in said


def test_a_tower_is_run_on_an_image(tiny: Any, tmp_path: Path) -> None:
    """A model that reads images among text is given one: all of it is reached, and a fault of its tower shows."""
    shards = Sharded(tiny("gemma3"), tmp_path, 2)
    verdict = shards.verify()
    sound(verdict)
    assert verdict.coverage == 1.0 and verdict.unreached == []
    name = next(n for n in open_shards(shards.root).manifest.notes if "vision" in n and n.endswith("out_proj.weight"))
    shards.change(1, name, flip_lowest_bit(0, 0))
    assert points(shards.verify())[0].endswith("self_attn.out_proj")


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"tokens": 1}, UsageError, "at least 2"),
        ({"compute": "fp8"}, UsageError, "choose fp64"),
        ({"mode": "sideways"}, UsageError, "sideways"),
        ({"device": "abacus"}, UsageError, "abacus"),
        ({"min_coverage": 2.0}, UsageError, "coverage"),
    ],
)
def test_arguments_that_make_no_sense(
    how: dict[str, Any], error: type[Exception], said: str, case: Case, tmp_path: Path
) -> None:
    shards = Sharded(case("F-V101"), tmp_path, 2)
    with pytest.raises(error, match=said):
        shards.verify(**how)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_where_one_was_asked_for(case: Case, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="CUDA"):
        Sharded(case("F-V101"), tmp_path, 2).verify(device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["F-LLAMA6", "F-Q3MOE", "F-MAMBA2"])
def test_on_a_gpu(name: str, case: Case, tmp_path: Path) -> None:
    sound(Sharded(case(name), tmp_path, 2).verify(device="cuda"))


def test_remote_code_is_not_run(doctored: Case, tmp_path: Path) -> None:
    source = doctored("F-LLAMA6")
    config = json.loads((source / "config.json").read_text())
    config |= {
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    sound(Sharded(source, tmp_path, 2).verify())  # the class that transformers has is run instead
    assert not (tmp_path / "ran").exists()


def test_an_unknown_class_is_unsupported(doctored: Case, tmp_path: Path) -> None:
    shards = Sharded(doctored("F-LLAMA6"), tmp_path, 2)
    shards.configure(model_type="no_such_model", architectures=["NoSuchModel"])
    with pytest.raises(UnsupportedError, match="transformers"):
        shards.verify()


@pytest.mark.parametrize("package", ["torch", "transformers"])
@pytest.mark.parametrize("version", [None, "1.13.1"])
def test_missing_or_old_packages(package: str, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata as metadata

    real = metadata.version

    def told(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", told)
    with pytest.raises(UnsupportedError, match=r"pip install 'tpshard\[verify\]'"):
        require()


def test_a_sharded_source_and_a_torch_file(case: Case, tmp_path: Path) -> None:
    sound(Sharded(case("F-SHARDED"), tmp_path / "a", 2).verify())
    source = tmp_path / "torch"
    source.mkdir()
    shutil.copy(case("F-LLAMA6") / "config.json", source)
    torch.save(load_file(case("F-LLAMA6") / "model.safetensors"), source / "pytorch_model.bin")
    sound(Sharded(source, tmp_path / "b", 2).verify())


def test_files_in_parts(case: Case, tmp_path: Path) -> None:
    split(case("F-LLAMA6"), tmp_path / "out", 3, max_file_bytes=20000)
    shards = open_shards(tmp_path / "out")
    assert len(shards.files) > 3
    sound(forward(shards, open_source(case("F-LLAMA6")), mode="zero-pad"))


def test_small_memory_gives_the_same_verdict(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-LLAMA12"), tmp_path, 4)
    with pytest.raises(UsageError, match=r"--max-memory of 1 bytes .* give at least \d+ MiB") as refused:
        shards.verify(max_memory=1)
    least = int(re.findall(r"at least (\d+) MiB", str(refused.value))[0])
    usual, small = shards.verify(), shards.verify(max_memory=least << 20)
    sound(small)
    assert [m.point for m in usual.measures] == [m.point for m in small.measures]
