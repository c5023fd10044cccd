"""Ranks on the shapes that they store: what engines do, and the only way that sees an order no rank could use."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the numeric verifier runs models with torch")
pytest.importorskip("transformers", reason="the numeric verifier runs the models of transformers")

import tiny_models
import torch

from tpshard.convert import split
from tpshard.errors import UnsupportedError
from tpshard.intervals import Run, Runs
from tpshard.layout import cut
from tpshard.numerics.forward import forward
from tpshard.partition import interned
from tpshard.shards import Shards, open_shards
from tpshard.source import open_source
from tpshard.verdicts import LevelVerdict

HEAD = 8  # of the tiny models here


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Path]]:
    """``made(name, tp_size)``: a tiny model and its shards."""
    root = tmp_path_factory.mktemp("local")

    def get(name: str, tp_size: int) -> tuple[Path, Path]:
        source, shards = root / name, root / f"{name}-{tp_size}"
        if not source.exists():
            tiny_models.write(name, source)
        if not shards.exists():
            split(source, shards, tp_size)
        return source, shards

    return get


def run(source: Path, shards: Path | Shards, mode: str) -> LevelVerdict:
    opened = open_shards(shards) if isinstance(shards, Path) else shards
    return forward(opened, open_source(source), mode=mode, min_coverage=0.0)


def replaced(shards: Path, rank: int, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change one tensor of one rank, as it is stored."""
    opened = open_shards(shards)
    number = next(n for n, file in enumerate(opened.manifest.files) if file.rank == rank)
    info = next(info for info in opened.files[number].tensors if info.name == name)
    dtype = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}[info.dtype]
    with (shards / opened.files[number].name).open("r+b") as file:
        file.seek(info.offset)
        tensor = torch.frombuffer(bytearray(file.read(info.nbytes)), dtype=dtype).view(info.shape)
        new = change(tensor).contiguous()
        assert new.shape == tensor.shape
        assert not torch.equal(new, tensor)
        file.seek(info.offset)
        file.write(new.view(torch.uint8).numpy().tobytes())


def reordered(shards: Path, name: str, order: Callable[[Runs], Runs]) -> Shards:
    """Shards whose ranks store dimension 0 of a tensor in another order, and say so: bytes and layout agree."""
    opened = open_shards(shards)
    layout = opened.placed.layout
    old = next(stored for stored in layout.stored if stored.name == name)
    dim = old.pieces[0].cut.dims[0]
    ranks = tuple(order(runs) for runs in dim.ranks)
    for rank, (before, after) in enumerate(zip(dim.ranks, ranks, strict=True)):
        if before != after:
            was = [i for run in before for i in range(run.start, run.start + run.length)]
            now = [was.index(i) for run in after for i in range(run.start, run.start + run.length)]
            replaced(shards, rank, name, lambda tensor, now=now: tensor[now])  # type: ignore[misc]
    new = old.pieces[0]._replace(cut=cut((interned(dim.extent, ranks), *old.pieces[0].cut.dims[1:]), layout.size))
    stored = tuple(s._replace(pieces=(new,)) if s.name == name else s for s in layout.stored)
    placed = dataclasses.replace(opened.placed, layout=dataclasses.replace(layout, stored=stored))
    return dataclasses.replace(opened, placed=placed)


def heads_reversed(runs: Runs) -> Runs:
    heads = [Run(run.start + at, HEAD) for run in runs for at in range(0, run.length, HEAD)]
    return tuple(reversed(heads))


@pytest.mark.parametrize("name", ["llama-vocab-101", "qwen3", "gpt2", "phi3", "gpt_oss", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("tp_size", [3, 4])
def test_good_shards_pass(name: str, tp_size: int, made: Callable[[str, int], tuple[Path, Path]]) -> None:
    """Uneven ranks, copies of KV heads, and a vocabulary with padding."""
    verdict = run(*made(name, tp_size), "auto")
    assert verdict.verdict == "passed", verdict.findings[:3]
    assert verdict.mode == "local"
    assert max(measure.error for measure in verdict.measures if measure.kind != "logits") < 1e-13
    assert {measure.kind for measure in verdict.measures} >= {"sum", "gather", "replicated", "probe"}


ORDERS = {
    "query heads reversed": ("llama", "model.layers.1.self_attn.q_proj.weight", heads_reversed, 2),
    "key heads reversed": ("opt", "model.decoder.layers.1.self_attn.k_proj.weight", heads_reversed, 2),
    "[k; q; v]": ("phi3", "model.layers.1.self_attn.qkv_proj.weight", lambda runs: (runs[1], runs[0], *runs[2:]), 2),
    "[up; gate]": ("phi3", "model.layers.1.mlp.gate_up_proj.weight", lambda runs: (runs[1], runs[0]), 2),
}


@pytest.mark.parametrize("fault", list(ORDERS))
def test_an_order_that_no_rank_could_use_is_seen_locally_alone(
    fault: str, made: Callable[[str, int], tuple[Path, Path]], tmp_path: Path
) -> None:
    name, tensor, order, tp_size = ORDERS[fault]
    source, good = made(name, tp_size)
    shards = reordered(Path(shutil.copytree(good, tmp_path / "shards")), tensor, order)
    assert run(source, shards, "zero-pad").verdict == "passed"
    verdict = run(source, shards, "local")
    assert verdict.verdict == "failed"
    block = tensor.rpartition(".")[0].rpartition(".")[0]
    assert verdict.findings[0].tensor.startswith(block)
    assert all(finding.tensor.startswith((block, "logits")) for finding in verdict.findings), verdict.findings
    assert run(source, shards, "auto").verdict == "failed"


def _exchanged(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[HEAD : 2 * HEAD], tensor[:HEAD], tensor[2 * HEAD :]])


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    out[1, 1] *= 1 + 2**-8  # the last bit of a bfloat16
    return out


FAULTS = {
    "two query heads exchanged": ("llama", 1, "model.layers.1.self_attn.q_proj.weight", _exchanged),
    "the last bit of one weight": ("llama", 0, "model.layers.0.mlp.down_proj.weight", _moved),
    "a norm of one rank": ("qwen3", 1, "model.layers.1.self_attn.q_norm.weight", lambda t: t * 1.001),
    "a row of the head": ("llama", 1, "lm_head.weight", lambda t: t * 1.02),
    "sinks exchanged": ("gpt_oss", 0, "model.layers.0.self_attn.sinks", lambda t: t.flip(0)),
    "an expert's bank reversed": ("gpt_oss", 1, "model.layers.1.mlp.experts.down_proj", lambda t: t.flip(0)),
    "split bias of c_attn": ("gpt2", 1, "transformer.h.1.attn.c_attn.bias", lambda t: t.flip(0)),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_is_named_by_its_block(
    fault: str, made: Callable[[str, int], tuple[Path, Path]], tmp_path: Path
) -> None:
    name, rank, tensor, change = FAULTS[fault]
    source, good = made(name, 2)
    shards = Path(shutil.copytree(good, tmp_path / "shards"))
    replaced(shards, rank, tensor, change)
    verdict = run(source, shards, "local")
    assert verdict.verdict == "failed"
    layer = ".".join(tensor.split(".")[:3]) if ".layers." in tensor or ".h." in tensor else "lm_head"
    assert verdict.findings[0].tensor.startswith(layer), verdict.findings
    assert all(finding.tensor.startswith((layer, "logits")) for finding in verdict.findings), verdict.findings


@pytest.mark.parametrize("name", ["olmo2", "mamba2", "falcon-rw"])
def test_what_cannot_run_locally_is_run_zero_padded_and_says_so(
    name: str, made: Callable[[str, int], tuple[Path, Path]]
) -> None:
    source, shards = made(name, 2)
    verdict = run(source, shards, "auto")
    assert (verdict.verdict, verdict.mode) == ("passed", "zero-pad")
    assert any("not on local shapes" in note for note in verdict.notes)
    with pytest.raises(UnsupportedError, match="cannot be run on local shapes"):
        run(source, shards, "local")
