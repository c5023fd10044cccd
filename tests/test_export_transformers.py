"""transformers' distributed checkpoints: chunks by the letter of the format, and transformers itself loading ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import enginemodels as models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from zoo import write
from zoo.models import build

from tpshard.converters.engines import transformers as engine
from tpshard.errors import DamagedError, UnsupportedError
from tpshard.exporting.checking import verify_engine
from tpshard.exporting.chunked import arrange_chunks, chunk
from tpshard.exporting.export import export
from tpshard.exporting.given import open_model
from tpshard.exporting.grid import Grid
from tpshard.exporting.merging import merge_engine

Rectangle = tuple[tuple[int, ...], torch.Tensor]


def rectangles(directory: Path) -> dict[str, list[Rectangle]]:
    """By name what the files say they hold, in their order."""
    found: dict[str, list[Rectangle]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            assert (metadata["format"], metadata["DCP_VERSION"]) == ("pt", "1.0")
            offsets = json.loads(metadata["DCP_SHARDING_INFO"])
            names = list(file.keys())
            assert set(names) == set(offsets)
            for name in names:
                found.setdefault(name, []).append((tuple(offsets[name]["saved_offsets"]), file.get_tensor(name)))
    return found


def joined(parts: list[Rectangle]) -> torch.Tensor:
    """The whole tensor; every element is in exactly one rectangle."""
    shape = [max(at[d] + part.shape[d] for at, part in parts) for d in range(parts[0][1].dim())]
    whole, times = torch.zeros(shape, dtype=parts[0][1].dtype), torch.zeros(shape)
    for at, part in parts:
        where = tuple(slice(start, start + length) for start, length in zip(at, part.shape, strict=True))
        whole[where] = part
        times[where] += 1
    assert bool((times == 1).all())
    return whole


ARCHITECTURES = (
    "llama", "phi3", "falcon", "gpt2", "gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_neox", "mamba2", "gemma2",
)  # fmt: skip
"""Fused in every order, input x output, per-expert and stacked experts, latent attention, a state space, tied."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp(request.param) / "hf"
    write(request.param, directory)
    return request.param, directory


@pytest.mark.parametrize("tp", [1, 3, 8])
def test_the_files_hold_the_modules_in_memory(checkpoint: tuple[str, Path], tp: int, tmp_path: Path) -> None:
    architecture, source = checkpoint
    export(source, tmp_path / "out", "transformers", tp)
    names = [f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors" for rank in range(tp)]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == names
    found = rectangles(tmp_path / "out")
    state = build(architecture, "causal", "", 0, None).state_dict()
    assert found.keys() >= state.keys()
    for name, value in state.items():
        assert torch.equal(joined(found[name]), value), name


@pytest.mark.parametrize("tp", [1, 3])
def test_reads_back_and_recuts(checkpoint: tuple[str, Path], tp: int, tmp_path: Path) -> None:
    _, source = checkpoint
    export(source, tmp_path / "a", "transformers", tp)
    assert verify_engine(tmp_path / "a", against=source).passed
    export(tmp_path / "a", tmp_path / "b", "transformers", 4)
    first, second = rectangles(tmp_path / "a"), rectangles(tmp_path / "b")
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(joined(first[name]), joined(second[name])), name


def test_what_no_rank_cuts_is_stored_once_and_evenly(tmp_path: Path) -> None:
    source, tensors = models.llama(tmp_path / "hf")
    report = export(source, tmp_path / "out", "transformers", 4)
    found = rectangles(tmp_path / "out")
    for name in tensors:
        assert len(found[name]) == (1 if "norm" in name else 4), name
    assert max(report.rank_bytes) - min(report.rank_bytes) <= 2 * 4096  # headers are padded to 4096 bytes


@given(extent=st.integers(0, 300), ranks=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_chunks_are_torchs(extent: int, ranks: int) -> None:
    parts = torch.arange(extent).chunk(ranks)
    for rank in range(ranks):
        start, stop = chunk(extent, rank, ranks)
        wanted = parts[rank].tolist() if rank < len(parts) else []
        assert list(range(start, stop)) == wanted


MODELS_BESIDE = [("t5", "seq2seq"), ("llava", "vlm"), ("qwen2_vl", "vlm"), ("bart", "seq2seq")]


@pytest.mark.parametrize(("architecture", "task"), MODELS_BESIDE)
def test_models_of_several_stacks(architecture: str, task: str, tmp_path: Path) -> None:
    """Every tensor in memory is there under its name, whatever stacks the model has."""
    write(architecture, tmp_path / "hf", task=task)
    opened = open_model(tmp_path / "hf")
    table = engine.table(opened.model, "5.24")
    arranged = arrange_chunks(opened.model, table, Grid(3, ((0, opened.model.layers),)), "transformers")
    in_memory = build(architecture, task, "", 0, None).state_dict()
    assert {stored.name for stored in arranged.layout.stored} >= in_memory.keys()
    export(tmp_path / "hf", tmp_path / "out", "transformers", 3)
    assert verify_engine(tmp_path / "out", against=tmp_path / "hf").passed


def test_names_that_differ_in_memory_are_refused(tmp_path: Path) -> None:
    write("granitemoe", tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="GraniteMoeForCausalLM has other names in memory"):
        export(tmp_path / "hf", tmp_path / "out", "transformers", 2)
    with pytest.raises(UnsupportedError, match="--pp 2"):
        write("llama", tmp_path / "llama")
        export(tmp_path / "llama", tmp_path / "out", "transformers", 2, pp_size=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_missing_shard_is_refused(gone: int, tmp_path: Path) -> None:
    """Where torch's own consolidation gives zeros, or a shorter tensor, without a word."""
    source, _ = models.llama(tmp_path / "hf")
    export(source, tmp_path / "out", "transformers", 3)
    (tmp_path / "out" / f"shard-{gone:05d}-model-00001-of-00001.safetensors").unlink()
    with pytest.raises((DamagedError, UnsupportedError)):
        merge_engine(tmp_path / "out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_shards_of_two_checkpoints_are_refused(tmp_path: Path) -> None:
    source, _ = models.llama(tmp_path / "hf")
    export(source, tmp_path / "two", "transformers", 2)
    export(source, tmp_path / "three", "transformers", 3)
    name = "shard-00002-model-00001-of-00001.safetensors"
    (tmp_path / "two" / name).write_bytes((tmp_path / "three" / name).read_bytes())
    with pytest.raises(DamagedError, match=r"of another checkpoint|missing"):
        merge_engine(tmp_path / "two", tmp_path / "merged")


HOSTILE = {
    "no metadata": lambda info: None,
    "no JSON": lambda info: "{",
    "no object": lambda info: "[]",
    "deep": lambda info: "[" * 100000,
    "no offsets": lambda info: json.dumps({name: {} for name in info}),
    "a fraction": lambda info: json.dumps(info | {"model.norm.weight": {"saved_offsets": [0.5]}}),
    "below zero": lambda info: json.dumps(info | {"model.norm.weight": {"saved_offsets": [-1]}}),
    "far away": lambda info: json.dumps(info | {"model.norm.weight": {"saved_offsets": [2**70]}}),
    "too many": lambda info: json.dumps(info | {"model.norm.weight": {"saved_offsets": [0, 0]}}),
    "a tensor less": lambda info: json.dumps({name: at for name, at in info.items() if name != "model.norm.weight"}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_header_is_refused(kind: str, tmp_path: Path) -> None:
    source, _ = models.llama(tmp_path / "hf")
    export(source, tmp_path / "out", "transformers", 2)
    path = next(p for p in sorted((tmp_path / "out").glob("*.safetensors")) if "model.norm.weight" in read_names(p))
    with safe_open(path, "pt") as file:
        info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        tensors = {name: file.get_tensor(name) for name in info}
    damaged = HOSTILE[kind](info)
    metadata = {"format": "pt", "DCP_VERSION": "1.0"} | ({} if damaged is None else {"DCP_SHARDING_INFO": damaged})
    save_file(tensors, path, metadata)
    with pytest.raises((DamagedError, UnsupportedError)):
        merge_engine(tmp_path / "out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def read_names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


PROGRAM = '''
import os, sys
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

source, saved, *exported = sys.argv[1:]
torch.set_num_threads(1)
config = lambda: DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
ids = torch.arange(1, 13).reshape(1, -1)
logits = []
for path in exported:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config()).eval()
    with torch.no_grad():
        logits.append(model(ids).logits)
model.save_pretrained(saved, distributed_checkpoint=True)
if dist.get_rank() == 0:
    whole = AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.no_grad():
        wanted = whole(ids).logits
    for path, found in zip(exported, logits):
        worst = ((found - wanted).abs().max() / wanted.abs().max()).item()
        print(path, worst)
        assert worst < 1e-5, (path, worst)
dist.barrier()
dist.destroy_process_group()
'''


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "mixtral", "phi3"])
def test_transformers_loads_ours_and_we_read_its_own(architecture: str, tmp_path: Path) -> None:
    """Files of 2, 3 and 8 ranks are loaded by 2; what transformers then saves is the source again."""
    pytest.importorskip("accelerate", reason="transformers loads distributed checkpoints with accelerate")
    source = tmp_path / "hf"
    write(architecture, source)
    outputs = []
    for tp in (2, 3, 8):
        outputs.append(str(tmp_path / f"tp{tp}"))
        export(source, outputs[-1], "transformers", tp)
    program = tmp_path / "load.py"
    program.write_text(PROGRAM)
    saved = tmp_path / "saved"
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    run = subprocess.run(
        [*launched, str(source), str(saved), *outputs], capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert verify_engine(saved, against=source).passed
    merge_engine(saved, tmp_path / "merged")
    assert verify_engine(outputs[1], against=tmp_path / "merged").passed
