"""vLLM's layout against rules written out by hand, and back again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import enginemodels as models
import numpy as np
import pytest
from click.testing import CliRunner
from enginemodels import EXPERTS, FFN, HEADS, KV, LAYERS, SIZE, VOCAB, Tensors, read_all
from vllmrules import attention, chunk, ends, experts, mlp, norms, require_same

from tpshard.cli import cli
from tpshard.errors import DamagedError, UnsupportedError, UsageError
from tpshard.exporting.checking import verify_engine
from tpshard.exporting.export import export
from tpshard.exporting.merging import merge_engine

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied": True},
    "one KV head": {"kv": 1},
    "biases": {"model_type": "qwen2", "bias": True},
    "norms of heads": {"model_type": "qwen3", "norms": True},
}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_dense_models(tmp_path: Path, kind: str, tp: int) -> None:
    source, tensors = models.llama(tmp_path / "hf", **KINDS[kind])
    report = export(source, tmp_path / "out", "vllm", tp)
    assert report.files == [f"model-rank-{rank}-part-0.safetensors" for rank in range(tp)]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    files = read_all(tmp_path / "out")
    assert len(files) == tp
    for rank in range(tp):
        held: Tensors = {}
        ends(held, tensors, rank, tp)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}"
            attention(held, tensors, f"{at}.self_attn", rank, tp, KINDS[kind].get("kv", KV))
            mlp(held, tensors, f"{at}.mlp", rank, tp)
            norms(held, tensors, at)
        require_same(files[f"model-rank-{rank}-part-0.safetensors"], held)
    assert verify_engine(tmp_path / "out", against=source).passed
    merge_engine(tmp_path / "out", tmp_path / "back")
    require_same(read_all(tmp_path / "back")["model.safetensors"], tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages(tmp_path: Path, tied: bool) -> None:
    """Five layers in three stages are 1, 2 and 2: none is left over for the last, and the last but one goes first."""
    source, tensors = models.llama(tmp_path / "hf", tied=tied)
    export(source, tmp_path / "out", "vllm", 2, pp_size=3)
    files = read_all(tmp_path / "out")
    bounds = [(0, 2), (2, 4), (4, 5)]  # 5 // 3 = 1 each; the two left over go to the stages before the last
    for pp, (start, stop) in enumerate(bounds):
        for rank in range(2):
            held: Tensors = {}
            ends_of = {"first": pp == 0, "last": pp == 2}
            ends(held, tensors, rank, 2, **ends_of)
            for layer in range(start, stop):
                at = f"model.layers.{layer}"
                attention(held, tensors, f"{at}.self_attn", rank, 2)
                mlp(held, tensors, f"{at}.mlp", rank, 2)
                norms(held, tensors, at)
            require_same(files[f"model-pp-{pp}-tp-{rank}-part-0.safetensors"], held)
    assert verify_engine(tmp_path / "out", against=source).passed
    merge_engine(tmp_path / "out", tmp_path / "back")
    require_same(read_all(tmp_path / "back")["model.safetensors"], tensors)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 4)])
def test_experts(tmp_path: Path, tp: int, ep: int, stacked: bool) -> None:
    """Five experts dealt to four ranks are 2, 1, 1, 1, and stay whole there."""
    source, tensors = models.qwen3_moe(tmp_path / "hf", stacked=stacked)
    export(source, tmp_path / "out", "vllm", tp, ep_size=ep)
    apart = dict(tensors)
    for layer in range(1, LAYERS):
        at = f"model.layers.{layer}.mlp.experts"
        for expert in range(EXPERTS if stacked else 0):
            both = tensors[f"{at}.gate_up_proj"][expert]
            apart[f"{at}.{expert}.gate_proj.weight"], apart[f"{at}.{expert}.up_proj.weight"] = both[:FFN], both[FFN:]
            apart[f"{at}.{expert}.down_proj.weight"] = tensors[f"{at}.down_proj"][expert]
    files = read_all(tmp_path / "out")
    own = [range(2), range(2, 3), range(3, 4), range(4, 5)]
    for rank in range(tp):
        held: Tensors = {}
        ends(held, tensors, rank, tp)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}"
            attention(held, tensors, f"{at}.self_attn", rank, tp)
            norms(held, tensors, at)
            if layer == 0:
                mlp(held, tensors, f"{at}.mlp", rank, tp)
                continue
            held[f"{at}.mlp.experts.gate.weight"] = tensors[f"{at}.mlp.gate.weight"]
            experts(held, apart, f"{at}.mlp.experts", rank, tp, own[rank] if ep > 1 else None)
        require_same(files[f"model-rank-{rank}-part-0.safetensors"], held)
    assert verify_engine(tmp_path / "out", against=source).passed is True
    merge_engine(tmp_path / "out", tmp_path / "back")
    require_same(read_all(tmp_path / "back")["model.safetensors"], tensors if not stacked else apart_only(apart))


def apart_only(tensors: Tensors) -> Tensors:
    """An engine's files do not say how the checkpoint spelled its experts: one by one is the table's first."""
    return {name: value for name, value in tensors.items() if not name.endswith(("gate_up_proj", "experts.down_proj"))}


def test_latent_attention_and_its_prediction_layer(tmp_path: Path) -> None:
    source, tensors = models.deepseek_v3(tmp_path / "hf")
    report = export(source, tmp_path / "out", "vllm", 2)
    assert any("prediction layer" in text for text in report.left_out)
    files = read_all(tmp_path / "out")
    for rank in range(2):
        held: Tensors = {}
        ends(held, tensors, rank, 2)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}"
            own, to = f"{at}.self_attn", f"{at}.self_attn.mla_attn"
            norms(held, tensors, at)
            down = [tensors[f"{own}.q_a_proj.weight"], tensors[f"{own}.kv_a_proj_with_mqa.weight"]]
            held[f"{own}.fused_qkv_a_proj.weight"] = np.concatenate(down)
            held[f"{to}.q_a_layernorm.weight"] = tensors[f"{own}.q_a_layernorm.weight"]
            held[f"{own}.kv_a_layernorm.weight"] = tensors[f"{own}.kv_a_layernorm.weight"]
            held[f"{to}.q_b_proj.weight"] = chunk(tensors[f"{own}.q_b_proj.weight"], 0, rank, 2)
            held[f"{own}.kv_b_proj.weight"] = chunk(tensors[f"{own}.kv_b_proj.weight"], 0, rank, 2)
            held[f"{to}.o_proj.weight"] = chunk(tensors[f"{own}.o_proj.weight"], 1, rank, 2)
            for name in ("k", "v", "q", "prob"):
                held[f"{to}.mla_attn._{name}_scale"] = np.float32(1)
            if layer == 0:
                mlp(held, tensors, f"{at}.mlp", rank, 2)
                continue
            held[f"{at}.mlp.experts.gate.weight"] = tensors[f"{at}.mlp.gate.weight"]
            correction = tensors[f"{at}.mlp.gate.e_score_correction_bias"]
            held[f"{at}.mlp.experts.gate.e_score_correction_bias"] = correction
            mlp(held, tensors, f"{at}.mlp.shared_experts", rank, 2, f"{at}.mlp.experts._shared_experts._layer")
            experts(held, tensors, f"{at}.mlp.experts", rank, 2)
        require_same(files[f"model-rank-{rank}-part-0.safetensors"], held)
    assert verify_engine(tmp_path / "out", against=source).passed


def test_from_shards_of_any_degree_and_from_other_degrees_of_its_own(tmp_path: Path) -> None:
    from tpshard.convert import split

    source, _ = models.qwen3_moe(tmp_path / "hf")
    split(source, tmp_path / "tp3", 3)
    export(source, tmp_path / "direct", "vllm", 4)
    export(tmp_path / "tp3", tmp_path / "shards", "vllm", 4)
    export(tmp_path / "direct", tmp_path / "two", "vllm", 2, pp_size=2)
    export(tmp_path / "two", tmp_path / "again", "vllm", 4)
    direct = {path.name: path.read_bytes() for path in (tmp_path / "direct").iterdir()}
    for name in ("shards", "again"):
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == direct


def test_the_names_of_an_earlier_version(tmp_path: Path) -> None:
    """0.11 kept experts one module up and attention's scales out of the state; its files know no stages."""
    source, tensors = models.qwen3_moe(tmp_path / "hf")
    export(source, tmp_path / "new", "vllm", 2)
    export(source, tmp_path / "old", "vllm@0.11", 2)
    new, old = (read_all(tmp_path / name)["model-rank-1-part-0.safetensors"] for name in ("new", "old"))
    renamed = {
        name.replace("routed_experts.", "").replace("experts.gate", "gate"): value
        for name, value in new.items() if not name.endswith("_scale")
    }  # fmt: skip
    require_same(old, renamed)
    merge_engine(tmp_path / "old", tmp_path / "back", engine="vllm@0.11")
    require_same(read_all(tmp_path / "back")["model.safetensors"], tensors)
    merge_engine(tmp_path / "old", tmp_path / "found")  # by its names alone
    assert verify_engine(tmp_path / "old", against=source).passed
    with pytest.raises(UnsupportedError, match="no --pp 2"):
        export(source, tmp_path / "out", "vllm@0.11", 2, pp_size=2)
    with pytest.raises(DamagedError, match=r"missing|does not have"):
        merge_engine(tmp_path / "old", tmp_path / "wrong", engine="vllm@0.33")


def test_parts_of_a_rank(tmp_path: Path) -> None:
    source, tensors = models.llama(tmp_path / "hf")
    report = export(source, tmp_path / "out", "vllm", 2, max_file_bytes=8192)
    parts = [name for name in report.files if "-rank-1-" in name]
    assert parts == [f"model-rank-1-part-{part}.safetensors" for part in range(len(parts))]
    assert len(parts) > 3
    merge_engine(tmp_path / "out", tmp_path / "back")
    require_same(read_all(tmp_path / "back")["model.safetensors"], tensors)


# -- what vLLM cannot load, and what is damaged -----------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"tp_size": 3}, UnsupportedError, r"at TP 3: .* (query heads|channels).* it can at 1, 2, 4, 8"),
        ({"tp_size": 16}, UnsupportedError, r"at TP 16: .*it can at 1, 2, 4, 8"),
        ({"tp_size": 0}, UsageError, "--tp 0"),
        ({"tp_size": 2, "pp_size": 6}, UnsupportedError, "5 layers cannot be 6 stages"),
        ({"tp_size": 2, "ep_size": 2}, UnsupportedError, "no experts"),
        ({"tp_size": 2, "stages": "2,2"}, UsageError, "4 layers to 2 stages; the model has 5"),
        ({"tp_size": 2, "stages": "2,3", "pp_size": 3}, UsageError, "leave --pp out"),
        ({"tp_size": 2, "engine": "vllm@0.1"}, UnsupportedError, r"vllm@0\.33"),
        ({"tp_size": 2, "engine": "tgi"}, UsageError, "choose .*vllm"),
    ],
)
def test_what_it_cannot_load(tmp_path: Path, how: dict[str, Any], error: type[Exception], message: str) -> None:
    source, _ = models.llama(tmp_path / "hf")
    with pytest.raises(error, match=message):
        export(source, tmp_path / "out", how.pop("engine", "vllm"), how.pop("tp_size"), **how)
    assert not (tmp_path / "out").exists()


def test_a_class_whose_names_are_not_known(tmp_path: Path) -> None:
    source, _ = models.llama(tmp_path / "hf")
    values = json.loads((source / "config.json").read_text())
    for named in (["SomethingElseForCausalLM"], []):
        (source / "config.json").write_text(json.dumps({**values, "architectures": named}))
        with pytest.raises(UnsupportedError, match=r"names for .* are not known; those of .*LlamaForCausalLM"):
            export(source, tmp_path / "out", "vllm", 2)


def test_half_a_fusion_is_refused(tmp_path: Path) -> None:
    make = models.Maker()
    make.ends()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        make.attention(f"{at}.self_attn")
        make.draw(f"{at}.self_attn.q_proj.bias", HEADS * SIZE)
        make.mlp(f"{at}.mlp")
        make.norms(at)
    source = make.written(tmp_path / "hf", models.config("LlamaForCausalLM", "llama"))
    with pytest.raises(UnsupportedError, match=r"qkv_proj.bias of q, k, v in one tensor; the checkpoint has no k, v"):
        export(source, tmp_path / "out", "vllm", 2)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("vllm")
    source, _ = models.llama(at / "hf")
    export(source, at / "out", "vllm", 2, pp_size=2)
    return at


def edited(directory: Path, name: str, change: Any) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(directory / name)
    change(tensors)
    save_file(tensors, directory / name, {"format": "pt"})


def edited_metadata(path: Path, key: str, value: str) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    with safe_open(path, "numpy") as file:
        metadata = dict(file.metadata())
    save_file(load_file(path), path, {**metadata, key: value})


LLAMA, DOWN = "LlamaForCausalLM", "model.layers.0.mlp.down_proj.weight"
FIRST = "model-pp-0-tp-0-part-0.safetensors"
DAMAGE: dict[str, tuple[Any, str]] = {
    "a rank's file is missing": (lambda d: (d / FIRST).unlink(), "files of 1 of 4 ranks are missing .*TP rank 0"),
    "a stage is missing": (lambda d: [p.unlink() for p in d.glob("model-pp-0*")], "pipeline stages \\[1\\]|missing"),
    "a tensor is missing": (
        lambda d: edited(d, FIRST, lambda t: t.pop("model.layers.0.mlp.gate_up_proj.weight")), "missing",
    ),
    "a scale is missing": (
        lambda d: edited(d, FIRST, lambda t: t.pop("model.layers.1.self_attn.attn._q_scale")), "_q_scale is missing",
    ),
    "a scale is another": (
        lambda d: edited(d, FIRST, lambda t: t.update({"model.layers.1.self_attn.attn._q_scale": np.array(2, "f4")})),
        "the constant F32",
    ),
    "a tensor of nothing": (lambda d: edited(d, FIRST, lambda t: t.update(stray=np.zeros(2, "f4"))), "stray"),
    "another shape": (
        lambda d: edited(d, FIRST, lambda t: t.update({DOWN: np.zeros((24, 8), "f4")})),
        r"\[24, 8\] where vllm has F32 \[24, 16\]",
    ),
    "a part of another run": (
        lambda d: shutil.copy(d / FIRST, d / "model-pp-0-tp-0-part-1.safetensors"), "another file of the rank",
    ),
    "one rank's file in another's place": (
        lambda d: shutil.copy(d / FIRST, d / FIRST.replace("tp-0", "tp-1")), "written for rank 0, and its name",
    ),
    "ranks of two exports": (
        lambda d: [edited_metadata(p, "tpshard.layout", "0" * 64) for p in d.glob("*pp-1-tp-1*")], "of two exports",
    ),
    "cut short": (lambda d: (d / FIRST).write_bytes((d / FIRST).read_bytes()[:-4]), "bytes"),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "another model's config": (
        lambda d: (d / "config.json").write_text(json.dumps(models.config(LLAMA, "llama", hidden_size=48))),
        "where vllm has|not of one model|contradict",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen_and_nothing_is_written(written: Path, tmp_path: Path, damage: str) -> None:
    directory = Path(shutil.copytree(written / "out", tmp_path / "out"))
    harm, message = DAMAGE[damage]
    harm(directory)
    with pytest.raises(DamagedError, match=message):
        merge_engine(directory, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    result = CliRunner().invoke(cli, ["verify", str(directory), "--against", str(written / "hf")])
    assert result.exit_code != 0


def test_changed_values_replicas_and_padding_are_found(written: Path, tmp_path: Path) -> None:
    def of(name: str, place: Any) -> Any:
        def change(tensors: Tensors) -> None:
            tensors[name] = tensors[name].copy()
            tensors[name][place] += 1

        return change

    for name, place, message in (
        ("model.layers.0.mlp.gate_up_proj.weight", (3, 3), "gate_up_proj"),
        ("model.layers.0.input_layernorm.weight", (1,), "differs from"),
    ):
        directory = Path(shutil.copytree(written / "out", tmp_path / name))
        edited(directory, FIRST, of(name, place))
        report = verify_engine(directory, against=written / "hf")
        assert not report.passed
        assert any(message in finding.message for finding in report.findings)
    directory = Path(shutil.copytree(written / "out", tmp_path / "padding"))
    edited(directory, "model-pp-1-tp-1-part-0.safetensors", of("lm_head.weight", (VOCAB % 96 + 20, 0)))
    report = verify_engine(directory, against=written / "hf")
    assert any("padding that is not zero" in finding.message for finding in report.findings)
    with pytest.raises(DamagedError, match="zero"):
        merge_engine(directory, tmp_path / "back")
