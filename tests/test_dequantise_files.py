"""``split --dequantize``: ranks hold slices of the values, at any degree, and merge gives a checkpoint of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ok, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantschemes import compressed_config
from quantweights import METHODS, write_llama
from weights import read, read_all, tensor, tree, write

import tpshard
from tpshard.checkpoint import open_checkpoint
from tpshard.degrees import largest_degree
from tpshard.dequantise import DTYPES, dequantised
from tpshard.openfiles import OpenFiles
from tpshard.quantisation.valuecodes import rounded
from tpshard.quantisation.valuereader import BoxReader, extents_of
from tpshard.quantised import quantised


def values_of(source: Path) -> dict[str, Any]:
    """The values of all quantised matrices, float32, each computed in one piece."""
    checkpoint = open_checkpoint(source)
    found = quantised(checkpoint.source.config, checkpoint.tensors)
    assert found is not None
    files = OpenFiles([source / file.name for file in checkpoint.source.files], [False] * len(checkpoint.source.files))
    boxes = BoxReader(files.read, extents_of(checkpoint.placed, 0))
    values = {name: matrix.values({}, boxes) for name, matrix in found.matrices(checkpoint.placed, 0).items()}
    files.close()
    return values


@pytest.mark.parametrize("word", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_merged_values_are_the_formulas(method: str, word: str, tmp_path: Path) -> None:
    write_llama(tmp_path / "source", method)
    tpshard.split(tmp_path / "source", tmp_path / "out", 3, dequantize=word)
    tpshard.merge(tmp_path / "out", tmp_path / "merged")
    merged, stored = read_all(tmp_path / "merged"), read_all(tmp_path / "source")
    values = values_of(tmp_path / "source")
    assert len(values) == 8
    for name, value in values.items():
        assert merged[name].dtype == DTYPES[word][0]
        assert merged[name].shape == value.shape
        assert merged[name].data == rounded(value, DTYPES[word][0]).tobytes()
    others = merged.keys() - values.keys()
    assert others
    assert all(merged[name] == stored[name] for name in others)
    assert not any("scale" in name or "qzeros" in name for name in others)
    assert tpshard.verify(tmp_path / "out", against=tmp_path / "merged").passed
    assert tpshard.verify(tmp_path / "out", against=tmp_path / "source").passed  # the values that it makes


@pytest.mark.parametrize("method", METHODS)
def test_from_shards_as_from_the_checkpoint(method: str, tmp_path: Path) -> None:
    """reshard and merge read what each rank holds, and give what a split and its merge give."""
    source = tmp_path / "source"
    write_llama(source, method)
    tpshard.split(source, tmp_path / "cut", min(4, largest_degree(open_checkpoint(source).axes)))
    tpshard.split(source, tmp_path / "direct", 3, dequantize="bf16")
    ok("reshard", tmp_path / "cut", tmp_path / "again", "--tp", 3, "--dequantize", "bf16")
    assert tree(tmp_path / "again") == tree(tmp_path / "direct")
    ok("merge", tmp_path / "direct", tmp_path / "merged")
    ok("merge", tmp_path / "cut", tmp_path / "joined", "--dequantize", "bf16")
    assert tree(tmp_path / "joined") == tree(tmp_path / "merged")
    assert tpshard.verify(tmp_path / "again", against=tmp_path / "cut").passed


def test_a_bank_from_shards(tmp_path: Path) -> None:
    write_bank(tmp_path / "source")
    tpshard.split(tmp_path / "source", tmp_path / "cut", 2)
    for degree in (1, 4):
        tpshard.split(tmp_path / "source", tmp_path / f"direct{degree}", degree, dequantize="fp16")
        tpshard.reshard(tmp_path / "cut", tmp_path / f"again{degree}", degree, dequantize="fp16")
        assert tree(tmp_path / f"again{degree}") == tree(tmp_path / f"direct{degree}")


def test_damaged_shards_are_not_dequantised(tmp_path: Path) -> None:
    write_llama(tmp_path / "source", "gptq")
    tpshard.split(tmp_path / "source", tmp_path / "cut", 2)
    file = next((tmp_path / "cut").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    for verb, more in (("reshard", ("--tp", 3)), ("merge", ())):
        refused(4, verb, tmp_path / "cut", tmp_path / "out", *more, "--dequantize", "bf16", says=(file.name, "damaged"))
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["value", "config"])
def test_values_are_verified_against_the_quantised_checkpoint(fault: str, tmp_path: Path) -> None:
    write_llama(tmp_path / "source", "awq")
    ok("split", tmp_path / "source", tmp_path / "out", "--tp", 3, "--dequantize", "bf16", "--verify", "bytes")
    if fault == "config":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    else:
        file = next((tmp_path / "out").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    report = tpshard.verify(tmp_path / "out", against=tmp_path / "source", levels=["bytes"])
    assert [finding.file for finding in report.findings] == ["config.json" if fault == "config" else file.name]


MEMORY = """
import resource, sys
import tpshard
verb, source, out = sys.argv[1:4]
how = {"dequantize": "bf16", "options": tpshard.Options(threads=2, max_memory=8 << 20)}
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[4]),) * 2)
getattr(tpshard, verb)(source, out, 3, **how)
"""


@pytest.mark.parametrize("method", ["gptq", "fp8-blocks"])
def test_memory_does_not_grow_with_the_model(method: str, tmp_path: Path) -> None:
    """96 MiB of values pass under a limit of data that leaves less beside what Python and numpy take themselves."""
    limit = 116 << 20
    source = tmp_path / "source"
    write_llama(source, method, hidden=512, ffn=32768)
    tpshard.split(source, tmp_path / "cut", 2)
    for verb, held in (("split", source), ("reshard", tmp_path / "cut")):
        command = [sys.executable, "-c", MEMORY, verb, str(held), str(tmp_path / verb), str(limit)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]


def test_a_degree_that_groups_forbid(tmp_path: Path) -> None:
    """64 channels are four groups of 16, which six ranks cannot share out."""
    source = tmp_path / "source"
    write_llama(source, "gptq", heads=8, kv_heads=8, head_dim=8, ffn=64)
    refused(3, "split", source, tmp_path / "no", "--tp", 6, says=("groups", "16", "--dequantize bf16"))
    report = json.loads(ok("split", source, tmp_path / "out", "--tp", 6, "--dequantize", "bf16", "--json").out)
    assert any("quantization_config" in text and "merge" in text for text in report["warnings"])
    ok("merge", tmp_path / "out", tmp_path / "merged")
    assert tpshard.verify(tmp_path / "out", against=tmp_path / "merged").passed


@pytest.mark.parametrize("memory", [1 << 20, 3 << 20])
def test_the_files_do_not_depend_on_tiles_or_threads(memory: int, tmp_path: Path) -> None:
    write_llama(tmp_path / "source", "gptq-order", ffn=1504, hidden=176)
    tpshard.split(tmp_path / "source", tmp_path / "out", 2, dequantize="fp16")
    options = tpshard.Options(max_memory=memory, threads=3)
    tpshard.split(tmp_path / "source", tmp_path / "again", 2, dequantize="fp16", options=options)
    assert tree(tmp_path / "out") == tree(tmp_path / "again")


def test_what_tells_of_the_quantisation_is_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_llama(source, "gptq")
    (source / "quantize_config.json").write_text("{}")
    (source / "tokenizer.json").write_text("{}")
    ok("split", source, tmp_path / "out", "--tp", 2, "--dequantize", "fp16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert original.pop("quantization_config")
    assert config == {**original, "torch_dtype": "float16"}
    assert {path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".json"} == {
        "config.json", "tokenizer.json", "tpshard.json",
    }  # fmt: skip
    said = json.loads((tmp_path / "out" / "tpshard.json").read_text())["source"]["left_out"]
    assert any(text.startswith("quantize_config.json (") for text in said)
    assert any("8 matrices, GPTQ with 4 bits in groups of 16" in text for text in said)


def test_files_of_a_checkpoint_keep_their_names_and_their_index(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_llama(source, "awq")
    tensors = read(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        mine = names[number - 1 :: 2]  # the members of a matrix lie in both files
        where |= dict.fromkeys(mine, file)
        write(source / file, {name: tensors[name] for name in mine})
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    tpshard.split(source, tmp_path / "out", 2, dequantize="bf16")
    tpshard.merge(tmp_path / "out", tmp_path / "merged")
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    found = {name: path.name for path in (tmp_path / "merged").glob("*.safetensors") for name in read(path)}
    assert index["weight_map"] == found
    assert set(found.values()) == set(where.values())
    merged = read_all(tmp_path / "merged")
    for name, value in values_of(source).items():
        assert merged[name].data == rounded(value, "BF16").tobytes()


def test_refusals(tmp_path: Path) -> None:
    from weights import write_llama as plain

    source = plain(tmp_path / "plain")
    refused(3, "split", source, tmp_path / "out", "--tp", 2, "--dequantize", "bf16", says=("no quantised matrix",))
    tpshard.split(source, tmp_path / "cut", 2)
    for verb, more in (("reshard", ("--tp", 3)), ("merge", ())):
        words = (verb, tmp_path / "cut", tmp_path / "out", *more, "--dequantize", "bf16")
        refused(3, *words, says=("no quantised matrix",))
    write_llama(tmp_path / "source", "gptq")
    with pytest.raises(tpshard.UsageError, match="bf16, fp16, fp32"):
        tpshard.split(tmp_path / "source", tmp_path / "out", 2, dequantize="int4")
    assert not (tmp_path / "out").exists()


def test_an_order_of_inputs_that_names_no_group_is_damage(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_llama(source, "gptq-order")
    tensors = read(source / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name] = tensor(np.full(tensors[name].shape, 99, np.int32), "I32")
    write(source / "model.safetensors", tensors)
    refused(4, "split", source, tmp_path / "out", "--tp", 2, "--dequantize", "bf16", says=(name, "group 99"))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module", params=["gptq-order", "awq", "fp8-blocks", "mxfp4 bank"])
def computed(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files whose bytes are computed, and one of them as bytes."""
    source = tmp_path_factory.mktemp("computed") / "source"
    if request.param == "mxfp4 bank":
        write_bank(source)
    else:
        write_llama(source, request.param)
    view = dequantised(open_checkpoint(source), "fp32")
    (file,) = view.checkpoint.source.files
    files = view.opened([source / file.name], [False])
    values, stored = values_of(source), read_all(source)
    data = b"".join(
        values[info.name].tobytes() if info.name in values else stored[info.name].data for info in file.tensors
    )
    assert len(data) + file.tensors[0].offset == file.size
    yield files, file.tensors[0].offset, data
    files.close()


def write_bank(source: Path) -> None:
    """A gpt-oss by names and shapes, whose experts are in MXFP4."""
    config = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 1, "vocab_size": 48,
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 8,
        "num_local_experts": 3, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    random = np.random.default_rng(1)
    at, experts = "model.layers.0", "model.layers.0.mlp.experts"
    shapes = {
        "model.embed_tokens.weight": (48, 64), "model.norm.weight": (64,), "lm_head.weight": (48, 64),
        f"{at}.input_layernorm.weight": (64,), f"{at}.post_attention_layernorm.weight": (64,),
        f"{at}.self_attn.sinks": (4,), f"{at}.mlp.router.weight": (3, 64), f"{at}.mlp.router.bias": (3,),
        f"{experts}.gate_up_proj_bias": (3, 192), f"{experts}.down_proj_bias": (3, 64),
    }  # fmt: skip
    for name, rows, into in (("q", 32, 64), ("k", 16, 64), ("v", 16, 64), ("o", 64, 32)):
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (rows, into), f"{at}.self_attn.{name}_proj.bias": (rows,)}
    tensors = {name: tensor(random.normal(size=shape).astype(np.float16), "F16") for name, shape in shapes.items()}
    for name, rows, into in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
        codes = random.integers(0, 256, (3, rows, into // 32, 16)).astype(np.uint8)
        tensors[f"{experts}.{name}_blocks"] = tensor(codes, "U8")
        exponents = random.integers(110, 140, codes.shape[:3]).astype(np.uint8)
        tensors[f"{experts}.{name}_scales"] = tensor(exponents, "U8")
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    write(source / "model.safetensors", tensors)


@given(data=st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_any_range_of_bytes(computed: Any, data: Any) -> None:
    files, start, expected = computed
    first = data.draw(st.integers(0, len(expected) - 1))
    last = min(len(expected), first + data.draw(st.sampled_from([1, 3, 7, 64, 255, 1000, 5001, 100_000])))
    buffer = bytearray(last - first)
    files.read(0, memoryview(buffer), start + first)
    assert buffer == expected[first:last]


def test_a_bank_at_a_degree_that_its_groups_forbid(tmp_path: Path) -> None:
    write_bank(tmp_path / "source")
    refused(3, "split", tmp_path / "source", tmp_path / "no", "--tp", 4)
    tpshard.split(tmp_path / "source", tmp_path / "out", 4, dequantize="bf16")
    tpshard.merge(tmp_path / "out", tmp_path / "merged")
    merged = read_all(tmp_path / "merged")
    for name, value in values_of(tmp_path / "source").items():
        assert merged[name].data == rounded(value, "BF16").tobytes()
        assert merged[name].shape[1] in (64, 96)  # as the model has it: inputs before outputs


def test_scales_of_the_kv_cache_are_left_out_and_said(tmp_path: Path) -> None:
    source = tmp_path / "source"
    config = write_llama(source, "fp8-outputs")
    config["quantization_config"] = compressed_config(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}
    )
    (source / "config.json").write_text(json.dumps(config))
    tensors = read(source / "model.safetensors")
    name = "model.layers.0.self_attn.k_scale"
    tensors[name] = tensor(np.ones((1,), np.float16), "F16")
    write(source / "model.safetensors", tensors)
    tpshard.split(source, tmp_path / "out", 2, dequantize="bf16")
    tpshard.merge(tmp_path / "out", tmp_path / "merged")
    assert name not in read_all(tmp_path / "merged")
    said = json.loads((tmp_path / "out" / "tpshard.json").read_text())["source"]["left_out"]
    assert any("k_scale" in text for text in said)
