"""TensorRT-LLM's checkpoint against rules written out by hand, and back again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import enginemodels as models
import numpy as np
import pytest
from enginemodels import FFN, HEADS, HIDDEN, KV, LAYERS, SIZE, VOCAB, Tensors, read_all
from safetensors.numpy import save_file

from tpshard.errors import DamagedError, UnsupportedError
from tpshard.exporting.checking import verify_engine
from tpshard.exporting.export import export
from tpshard.exporting.merging import merge_engine

EXPERTS = 4


def mixtral(directory: Path, *, router: str = "float32") -> tuple[Path, Tensors]:
    make = models.Maker(3)
    make.ends()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        make.attention(f"{at}.self_attn")
        make.norms(at)
        make.draw(f"{at}.block_sparse_moe.gate.weight", EXPERTS, HIDDEN)
        name = f"{at}.block_sparse_moe.gate.weight"
        make.tensors[name] = make.tensors[name].astype(router)
        for expert in range(EXPERTS):
            make.mlp(f"{at}.block_sparse_moe.experts.{expert}", names=("w1", "w3", "w2"))
    values = models.config("MixtralForCausalLM", "mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2)
    return make.written(directory, values), make.tensors


def dealt(layers: int, stages: int) -> list[range]:
    """Layers left over go to the first stages: ``numpy.array_split``."""
    return [range(int(part[0]), int(part[-1]) + 1) for part in np.array_split(np.arange(layers), stages)]


def kv_rows(value: np.ndarray, rank: int, tp: int) -> np.ndarray:
    if tp <= KV:
        return np.split(value, tp)[rank]
    head = rank * KV // tp
    return value[head * SIZE : (head + 1) * SIZE]


def expected(source: Tensors, rank: int, tp: int, pp: int, *, whole_experts: bool = False) -> Tensors:
    """What ``rank{pp * tp_size + tp}`` holds."""
    stage, own = divmod(rank, tp)
    held: Tensors = {}
    if stage == 0:
        held["transformer.vocab_embedding.weight"] = source["model.embed_tokens.weight"]
    if stage == pp - 1:
        head = source.get("lm_head.weight", source["model.embed_tokens.weight"])
        padded = np.zeros((-(-VOCAB // tp) * tp, HIDDEN), head.dtype)
        padded[:VOCAB] = head
        held["lm_head.weight"] = np.split(padded, tp)[own]
        held["transformer.ln_f.weight"] = source["model.norm.weight"]
    for local, layer in enumerate(dealt(LAYERS, pp)[stage]):
        at, to = f"model.layers.{layer}", f"transformer.layers.{local}"
        q, k, v = (source[f"{at}.self_attn.{name}_proj.weight"] for name in "qkv")
        rows = [np.split(q, tp)[own], kv_rows(k, own, tp), kv_rows(v, own, tp)]
        held[f"{to}.attention.qkv.weight"] = np.concatenate(rows)
        held[f"{to}.attention.dense.weight"] = np.split(source[f"{at}.self_attn.o_proj.weight"], tp, 1)[own]
        held[f"{to}.input_layernorm.weight"] = source[f"{at}.input_layernorm.weight"]
        held[f"{to}.post_layernorm.weight"] = source[f"{at}.post_attention_layernorm.weight"]
        if f"{at}.mlp.gate_proj.weight" in source:
            held[f"{to}.mlp.fc.weight"] = np.split(source[f"{at}.mlp.gate_proj.weight"], tp)[own]
            held[f"{to}.mlp.gate.weight"] = np.split(source[f"{at}.mlp.up_proj.weight"], tp)[own]
            held[f"{to}.mlp.proj.weight"] = np.split(source[f"{at}.mlp.down_proj.weight"], tp, 1)[own]
            continue
        moe = f"{at}.block_sparse_moe"
        held[f"{to}.mlp.router.weight"] = source[f"{moe}.gate.weight"]
        owned = np.split(np.arange(EXPERTS), tp)[own] if whole_experts else range(EXPERTS)
        parts, part = (1, 0) if whole_experts else (tp, own)
        fc, proj = [], []
        for expert in owned:
            up, gate = (np.split(source[f"{moe}.experts.{expert}.{name}.weight"], parts)[part] for name in ("w3", "w1"))
            fc.append(np.concatenate([up, gate]))
            proj.append(np.split(source[f"{moe}.experts.{expert}.w2.weight"], parts, 1)[part])
        held[f"{to}.mlp.fc.weight"], held[f"{to}.mlp.proj.weight"] = np.stack(fc), np.stack(proj)
    return held


def require_files(out: Path, source: Tensors, tp: int, pp: int, **how: Any) -> None:
    files = read_all(out)
    assert set(files) == {f"rank{rank}.safetensors" for rank in range(tp * pp)}
    for rank in range(tp * pp):
        held, wanted = files[f"rank{rank}.safetensors"], expected(source, rank, tp, pp, **how)
        assert held.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(held[name], value, err_msg=name)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (1, 3), (4, 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_dense(tied: bool, tp: int, pp: int, tmp_path: Path) -> None:
    source, tensors = models.llama(tmp_path / "hf", tied=tied)
    export(source, tmp_path / "out", "trtllm", tp, pp_size=pp)
    require_files(tmp_path / "out", tensors, tp, pp)


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 4)])
def test_mixture(tp: int, pp: int, ep: int, tmp_path: Path) -> None:
    source, tensors = mixtral(tmp_path / "hf")
    export(source, tmp_path / "out", "trtllm", tp, pp_size=pp, ep_size=ep)
    require_files(tmp_path / "out", tensors, tp, pp, whole_experts=ep > 1)


def test_its_config_stands_for_the_models(tmp_path: Path) -> None:
    source, _ = mixtral(tmp_path / "hf")
    values = json.loads((source / "config.json").read_text())
    values |= {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}, "rms_norm_eps": 1e-5}
    (source / "config.json").write_text(json.dumps(values))
    export(source, tmp_path / "out", "trtllm", 4, pp_size=2, ep_size=4)
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "architectures" not in made
    assert made["architecture"] == "MixtralForCausalLM"
    assert (made["dtype"], made["hidden_act"], made["norm_epsilon"]) == ("float32", "swiglu", 1e-5)
    assert (made["hidden_size"], made["intermediate_size"], made["vocab_size"]) == (HIDDEN, FFN, VOCAB)
    assert (made["num_attention_heads"], made["num_key_value_heads"], made["head_size"]) == (HEADS, KV, SIZE)
    assert (made["rotary_base"], made["rotary_scaling"]) == (5e5, {"rope_type": "llama3", "factor": 8.0})
    wanted = {"world_size": 8, "tp_size": 4, "pp_size": 2, "moe_tp_size": 1, "moe_ep_size": 4}
    assert wanted.items() <= made["mapping"].items()
    assert made["moe"] == {"num_experts": EXPERTS, "top_k": 2, "normalization_mode": 1}


@pytest.mark.parametrize(("tp", "pp", "ep"), [(4, 1, 1), (2, 3, 1), (2, 2, 2)])
def test_reads_back_with_the_models_config(tp: int, pp: int, ep: int, tmp_path: Path) -> None:
    source, tensors = mixtral(tmp_path / "hf") if ep > 1 else models.llama(tmp_path / "hf")
    export(source, tmp_path / "out", "trtllm", tp, pp_size=pp, ep_size=ep)
    assert verify_engine(tmp_path / "out", against=source, config=source).passed
    merge_engine(tmp_path / "out", tmp_path / "merged", config=source)
    merged = read_all(tmp_path / "merged")["model.safetensors"]
    if ep == 1:  # the family's first spelling of experts need not be this checkpoint's
        assert merged.keys() == tensors.keys()
        for name, value in tensors.items():
            np.testing.assert_array_equal(merged[name], value, err_msg=name)


def test_what_it_cannot_load_is_refused_before_writing(tmp_path: Path) -> None:
    source, _ = mixtral(tmp_path / "half", router="float16")
    with pytest.raises(UnsupportedError, match="wants routers in F32"):
        export(source, tmp_path / "out", "trtllm", 2)
    source, _ = models.llama(tmp_path / "qwen2", model_type="qwen2", bias=True)
    with pytest.raises(UnsupportedError, match="names for Qwen2ForCausalLM are not known"):
        export(source, tmp_path / "out", "trtllm", 2)
    source, tensors = models.llama(tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="it can at 1, 2, 4, 8"):
        export(source, tmp_path / "out", "trtllm", 3)
    with pytest.raises(UnsupportedError, match="one file a rank"):
        export(source, tmp_path / "out", "trtllm", 2, max_file_bytes=4096)
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(HIDDEN, np.float32)
    for layer in range(LAYERS):
        for name, rows in (("q", HEADS * SIZE), ("k", KV * SIZE), ("v", KV * SIZE), ("o", HIDDEN)):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = np.ones(rows, np.float32)
    save_file(tensors, source / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"attention_bias": True}))
    with pytest.raises(UnsupportedError, match=r"no place for model.layers.0.self_attn.\w_proj.bias"):
        export(source, tmp_path / "out", "trtllm", 2)
    assert not (tmp_path / "out").exists()


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    source, _ = models.llama(tmp_path / "hf")
    export(source, tmp_path / "out", "trtllm", 2, pp_size=2)
    (tmp_path / "out" / "rank2.safetensors").unlink()
    with pytest.raises(DamagedError, match="missing"):
        merge_engine(tmp_path / "out", tmp_path / "merged", config=source)
