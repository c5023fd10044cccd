"""SGLang's layout of dense models against rules written out by hand, and back again."""

from __future__ import annotations

import json
from pathlib import Path

import enginemodels as models
import numpy as np
import pytest
from enginemodels import KV, LAYERS, SIZE, VOCAB, Tensors, read_all

from tpshard.errors import UnsupportedError
from tpshard.exporting.checking import verify_engine
from tpshard.exporting.export import export
from tpshard.exporting.merging import merge_engine


def vocabulary(value: np.ndarray, rank: int, tp: int) -> np.ndarray:
    """64 rows, or 64 for every rank where those are not equal shares."""
    rows = -(-VOCAB // 64) * 64
    rows = rows if rows % tp == 0 else -(-VOCAB // (64 * tp)) * 64 * tp
    full = np.zeros((rows, value.shape[1]), value.dtype)
    full[:VOCAB] = value
    return np.split(full, tp)[rank]


def kv_rows(value: np.ndarray, rank: int, tp: int) -> np.ndarray:
    if tp <= KV:
        return np.split(value, tp)[rank]
    head = rank * KV // tp
    return value[head * SIZE : (head + 1) * SIZE]


def expected(source: Tensors, rank: int, tp: int) -> Tensors:
    held: Tensors = {"model.norm.weight": source["model.norm.weight"]}
    held["lm_head.weight"] = vocabulary(source.get("lm_head.weight", source["model.embed_tokens.weight"]), rank, tp)
    if "lm_head.weight" in source:
        held["model.embed_tokens.weight"] = vocabulary(source["model.embed_tokens.weight"], rank, tp)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            if f"{at}.self_attn.q_proj.{kind}" in source:
                q, k, v = (source[f"{at}.self_attn.{name}_proj.{kind}"] for name in "qkv")
                rows = [np.split(q, tp)[rank], kv_rows(k, rank, tp), kv_rows(v, rank, tp)]
                held[f"{at}.self_attn.qkv_proj.{kind}"] = np.concatenate(rows)
        held[f"{at}.self_attn.o_proj.weight"] = np.split(source[f"{at}.self_attn.o_proj.weight"], tp, 1)[rank]
        both = [np.split(source[f"{at}.mlp.{name}_proj.weight"], tp)[rank] for name in ("gate", "up")]
        held[f"{at}.mlp.gate_up_proj.weight"] = np.concatenate(both)
        held[f"{at}.mlp.down_proj.weight"] = np.split(source[f"{at}.mlp.down_proj.weight"], tp, 1)[rank]
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            if f"{at}.{name}.weight" in source:
                held[f"{at}.{name}.weight"] = source[f"{at}.{name}.weight"]
    return held


MODELS = {
    "llama": {}, "tied": {"tied": True}, "qwen2": {"model_type": "qwen2", "bias": True},
    "qwen3": {"model_type": "qwen3", "norms": True},
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_every_rank_holds_what_the_format_says(kind: str, tp: int, tmp_path: Path) -> None:
    source, tensors = models.llama(tmp_path / "hf", **MODELS[kind])
    export(source, tmp_path / "out", "sglang", tp)
    files = read_all(tmp_path / "out")
    assert set(files) == {f"model-rank-{rank}-part-0.safetensors" for rank in range(tp)}
    for rank in range(tp):
        held, wanted = files[f"model-rank-{rank}-part-0.safetensors"], expected(tensors, rank, tp)
        assert held.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(held[name], value, err_msg=name)
    assert verify_engine(tmp_path / "out", against=source, engine="sglang").passed


@pytest.mark.parametrize("kind", MODELS)
def test_merges_to_the_source(kind: str, tmp_path: Path) -> None:
    source, tensors = models.llama(tmp_path / "hf", **MODELS[kind])
    export(source, tmp_path / "out", "sglang", 4, max_file_bytes=4096)
    assert len(read_all(tmp_path / "out")) > 8
    merge_engine(tmp_path / "out", tmp_path / "merged", engine="sglang")
    merged = read_all(tmp_path / "merged")["model.safetensors"]
    assert merged.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(merged[name], value, err_msg=name)


def test_a_degree_that_heads_do_not_allow_is_refused(tmp_path: Path) -> None:
    source, _ = models.llama(tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="it can at 1, 2, 4, 8"):
        export(source, tmp_path / "out", "sglang", 3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(131, 2, 96), (131, 4, 48), (100, 3, 64), (151936, 8, 18992)])
def test_rows_of_the_vocabulary(vocab: int, tp: int, rows: int) -> None:
    from tpshard.converters.engines import sglang

    assert sglang.rows(vocab, tp) == rows


def test_what_hangs_on_the_back_end_is_refused(tmp_path: Path) -> None:
    source, _ = models.qwen3_moe(tmp_path / "moe")
    with pytest.raises(UnsupportedError, match="hangs on the device"):
        export(source, tmp_path / "out", "sglang", 2)
    source, _ = models.llama(tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="--pp 2"):
        export(source, tmp_path / "out", "sglang", 2, pp_size=2)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(UnsupportedError, match="names for OtherForCausalLM are not known"):
        export(source, tmp_path / "out", "sglang", 2)
    assert not (tmp_path / "out").exists()
