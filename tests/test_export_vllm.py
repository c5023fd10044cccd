"""vLLM's layout against rules written out by hand, against vLLM's own names, and back again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import enginemodels as models
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import SHARED
from enginemodels import EXPERTS, FFN, HEADS, KV, LAYERS, SIZE, VOCAB, Tensors, read_all

from tpshard.cli import cli
from tpshard.errors import DamagedError, UnsupportedError, UsageError
from tpshard.exporting.arrange import arrange
from tpshard.exporting.checking import verify_engine
from tpshard.exporting.export import export
from tpshard.exporting.files import held_by
from tpshard.exporting.given import open_model
from tpshard.exporting.merging import merge_engine
from tpshard.exporting.options import engine_and_version, grid_of


def chunk(value: np.ndarray, dim: int, rank: int, tp: int) -> np.ndarray:
    return np.split(value, tp, dim)[rank]


def padded(value: np.ndarray, rank: int, tp: int) -> np.ndarray:
    rows = -(-len(value) // 64) * 64
    return chunk(np.concatenate([value, np.zeros((rows - len(value), value.shape[1]), value.dtype)]), 0, rank, tp)


def kv_rows(value: np.ndarray, rank: int, tp: int, kv: int) -> np.ndarray:
    if tp <= kv:
        return chunk(value, 0, rank, tp)
    head = rank // (tp // kv)
    return value[head * SIZE : (head + 1) * SIZE]


def attention(held: Tensors, source: Tensors, at: str, rank: int, tp: int, kv: int = KV) -> None:
    """The rules of ``QKVParallelLinear`` and ``RowParallelLinear``."""
    for kind in ("weight", "bias"):
        if f"{at}.q_proj.{kind}" in source:
            q, k, v = (source[f"{at}.{name}_proj.{kind}"] for name in "qkv")
            parts = [chunk(q, 0, rank, tp), kv_rows(k, rank, tp, kv), kv_rows(v, rank, tp, kv)]
            held[f"{at}.qkv_proj.{kind}"] = np.concatenate(parts)
    held[f"{at}.o_proj.weight"] = chunk(source[f"{at}.o_proj.weight"], 1, rank, tp)
    for name in ("q_norm.weight", "k_norm.weight"):
        if f"{at}.{name}" in source:
            held[f"{at}.{name}"] = source[f"{at}.{name}"]
    for name in "kvq":
        held[f"{at}.attn._{name}_scale"] = np.float32(1)
    held[f"{at}.attn._prob_scale"] = np.float32(1)


def mlp(held: Tensors, source: Tensors, at: str, rank: int, tp: int, to: str = "") -> None:
    gate, up = (chunk(source[f"{at}.{name}_proj.weight"], 0, rank, tp) for name in ("gate", "up"))
    held[f"{to or at}.gate_up_proj.weight"] = np.concatenate([gate, up])
    held[f"{to or at}.down_proj.weight"] = chunk(source[f"{at}.down_proj.weight"], 1, rank, tp)


def experts(held: Tensors, source: Tensors, at: str, rank: int, tp: int, whole: range | None = None) -> None:
    """``FusedMoE``: every expert cut, or with ``whole`` these experts and no cut."""
    own = range(EXPERTS) if whole is None else whole
    first, second = [], []
    for expert in own:
        gate, up, down = (source[f"{at}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        if whole is None:
            gate, up, down = chunk(gate, 0, rank, tp), chunk(up, 0, rank, tp), chunk(down, 1, rank, tp)
        first.append(np.concatenate([gate, up]))
        second.append(down)
    if first:
        held[f"{at}.routed_experts.w13_weight"] = np.stack(first)
        held[f"{at}.routed_experts.w2_weight"] = np.stack(second)


def norms(held: Tensors, source: Tensors, at: str) -> None:
    for name in ("input_layernorm", "post_attention_layernorm"):
        held[f"{at}.{name}.weight"] = source[f"{at}.{name}.weight"]


def ends(held: Tensors, source: Tensors, rank: int, tp: int, first: bool = True, last: bool = True) -> None:
    embed = source["model.embed_tokens.weight"]
    if first and ("lm_head.weight" in source or not last):
        held["model.embed_tokens.weight"] = padded(embed, rank, tp)
    if last:
        held["lm_head.weight"] = padded(source.get("lm_head.weight", embed), rank, tp)
        held["model.norm.weight"] = source["model.norm.weight"]


def require_same(found: Tensors, wanted: Tensors) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].shape == np.shape(value), name
        assert np.array_equal(found[name], value), name


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


def test_a_class_that_vllm_runs_by_transformers(tmp_path: Path) -> None:
    """Queries, keys and values stay apart, norms over all heads are whole, gate and up are fused."""
    make = models.Maker()
    make.ends()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        make.attention(f"{at}.self_attn")
        make.draw(f"{at}.self_attn.q_norm.weight", HEADS * SIZE)
        make.draw(f"{at}.self_attn.k_norm.weight", KV * SIZE)
        make.mlp(f"{at}.mlp")
        make.draw(f"{at}.post_attention_layernorm.weight", models.HIDDEN)
        make.draw(f"{at}.post_feedforward_layernorm.weight", models.HIDDEN)
    source = make.written(tmp_path / "hf", models.config("Olmo2ForCausalLM", "olmo2"))
    export(source, tmp_path / "out", "vllm", 2)
    for rank in range(2):
        held: Tensors = {}
        ends(held, make.tensors, rank, 2)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}"
            mlp(held, make.tensors, f"{at}.mlp", rank, 2)
            for name in "qkv":
                at_name = f"{at}.self_attn.{name}_proj.weight"
                held[at_name] = chunk(make.tensors[at_name], 0, rank, 2)
            held[f"{at}.self_attn.o_proj.weight"] = chunk(make.tensors[f"{at}.self_attn.o_proj.weight"], 1, rank, 2)
            for name in ("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"):
                held[f"{at}.{name}.weight"] = make.tensors[f"{at}.{name}.weight"]
            for name in ("k", "v", "q", "prob"):
                held[f"{at}.self_attn.attn._{name}_scale"] = np.float32(1)
        require_same(read_all(tmp_path / "out")[f"model-rank-{rank}-part-0.safetensors"], held)
    merge_engine(tmp_path / "out", tmp_path / "back")
    require_same(read_all(tmp_path / "back")["model.safetensors"], make.tensors)
    with pytest.raises(UnsupportedError, match=r"2 KV heads, and there ranks do not share one; it can at 1, 2"):
        export(source, tmp_path / "four", "vllm", 4)


def test_what_transformers_has_fused_is_cut_as_it_is(tmp_path: Path) -> None:
    """GLM's gate and up in one matrix: the first of two ranks has the gate, and vLLM gathers the product."""
    make = models.Maker()
    make.ends()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        make.attention(f"{at}.self_attn")
        make.draw(f"{at}.mlp.gate_up_proj.weight", 2 * FFN, models.HIDDEN)
        make.draw(f"{at}.mlp.down_proj.weight", models.HIDDEN, FFN)
        make.norms(at)
    values = models.config("GlmForCausalLM", "glm", attention_bias=False)
    source = make.written(tmp_path / "hf", values)
    export(source, tmp_path / "out", "vllm", 2)
    files = read_all(tmp_path / "out")
    for rank in range(2):
        found = files[f"model-rank-{rank}-part-0.safetensors"]["model.layers.1.mlp.gate_up_proj.weight"]
        assert np.array_equal(found, make.tensors["model.layers.1.mlp.gate_up_proj.weight"][rank * FFN : (rank + 1) * FFN])
    merge_engine(tmp_path / "out", tmp_path / "back")
    require_same(read_all(tmp_path / "back")["model.safetensors"], make.tensors)


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


def changed_config(source: Path, **values: Any) -> None:
    config = json.loads((source / "config.json").read_text()) | values
    (source / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_what_vllm_itself_cannot_load(tmp_path: Path) -> None:
    llama, experts, latent = tmp_path / "llama", tmp_path / "experts", tmp_path / "latent"
    models.llama(llama)
    models.qwen3_moe(experts)
    models.deepseek_v3(latent)
    changed_config(llama, architectures=["MPTForCausalLM"])
    changed_config(experts, architectures=["Qwen3ForCausalLM"])
    changed_config(latent, topk_method=None)
    for source, message in (
        (llama, r"0\.33 cannot run MPTForCausalLM, which it supported until 0\.28"),
        (experts, r"Qwen3ForCausalLM has no experts, and the model has model\.layers\.1\.mlp\.gate\.weight"),
        (latent, r'e_score_correction_bias where config.json says topk_method None; add "topk_method": "noaux_tc"'),
    ):
        with pytest.raises(UnsupportedError, match=message):
            export(source, tmp_path / "out", "vllm", 2)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("phi", {}, r"makes lm_head\.bias of PhiForCausalLM only while it loads a checkpoint"),
        ("stablelm", {"qk_layernorm": True}, r"StableLmForCausalLM has no place for .*_layernorm\.norms\.0"),
    ],
)
def test_parts_that_vllm_has_no_place_for(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="the tiny models are made with transformers")
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, bos_token_id=1, eos_token_id=2, pad_token_id=0, **changes,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    with pytest.raises(UnsupportedError, match=message):
        export(tmp_path / "hf", tmp_path / "out", "vllm", 2)


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


# -- vLLM's own word --------------------------------------------------------------------------------

KEYS = SHARED / "vllm-0.32-keys.md"
TINY = SHARED / "tools" / "vllm_tiny_models.py"


def dumped() -> dict[str, list[str]]:
    """Name, dtype and shape of every tensor of rank 0 at TP 2, by model, as vLLM 0.32's loaders held them."""
    out = {}
    if KEYS.exists():
        for section in re.split(r"\n## ", KEYS.read_text())[1:]:
            found = re.search(r"\*\*pre\*\* class.*?\n```\n(.*?)\n```", section, re.S)
            if found:
                lines = [re.sub(r"\s+", " ", line) for line in found[1].split("\n")]
                out[section.split("-tp2\n", 1)[0]] = sorted(lines)
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="the tiny models are made with transformers")
    at = tmp_path_factory.mktemp("tiny")
    names = [name for name in dumped() if name != "gpt2"]
    subprocess.run([sys.executable, str(TINY), str(at), *names], check=True, capture_output=True, timeout=300)
    return at


@pytest.mark.skipif(not KEYS.exists() or not TINY.exists(), reason=f"needs {KEYS} and {TINY}")
def test_names_shapes_and_dtypes_are_those_of_vllm(tiny: Path) -> None:
    module, version = engine_and_version("vllm@0.32")
    compared = 0
    for name, wanted in dumped().items():
        if not (tiny / name).exists():
            continue
        model = open_model(tiny / name).model
        try:
            table = module.table(model, version)
        except UnsupportedError:
            continue
        arranged = arrange(model, table, grid_of(model, table, "vllm", 2), "vllm")
        held = [f"{one.name} {one.dtype} {list(one.shape)}" for one in held_by(arranged, table, 0)]
        assert sorted(held) == wanted, name
        compared += 1
    assert compared >= 19
