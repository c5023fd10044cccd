"""Where vLLM's classes differ: by hand, by what vLLM itself cannot load, and against the names of its own loaders."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import enginemodels as models
import numpy as np
import pytest
from conftest import SHARED
from enginemodels import FFN, HEADS, KV, LAYERS, SIZE, Tensors, read_all
from vllmrules import chunk, ends, mlp, require_same

from tpshard.errors import UnsupportedError
from tpshard.exporting.arrange import arrange
from tpshard.exporting.export import export
from tpshard.exporting.files import held_by
from tpshard.exporting.given import open_model
from tpshard.exporting.merging import merge_engine
from tpshard.exporting.options import engine_and_version, grid_of

NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


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
        for name in NORMS:
            make.draw(f"{at}.{name}.weight", models.HIDDEN)
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
            for name in ("self_attn.q_norm", "self_attn.k_norm", *NORMS):
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
    files, name = read_all(tmp_path / "out"), "model.layers.1.mlp.gate_up_proj.weight"
    for rank in range(2):
        found = files[f"model-rank-{rank}-part-0.safetensors"][name]
        assert np.array_equal(found, make.tensors[name][rank * FFN : (rank + 1) * FFN])
    merge_engine(tmp_path / "out", tmp_path / "back")
    require_same(read_all(tmp_path / "back")["model.safetensors"], make.tensors)


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
    assert compared >= 20, compared
