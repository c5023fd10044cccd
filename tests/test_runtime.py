"""One process a rank: each with its own file, compared with the original in the dtype of the weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the numeric verifier runs models with torch")
pytest.importorskip("transformers", reason="the numeric verifier runs the models of transformers")
pytest.importorskip("torch.distributed", reason="processes meet through torch.distributed")

import test_local
import tiny_models
import torch

from tpshard.convert import split
from tpshard.errors import DamagedError, StorageError, UnsupportedError, UsageError
from tpshard.launch import launched, reports
from tpshard.numerics import processes
from tpshard.numerics.processes import own_store, place_of
from tpshard.numerics.runtime import runtime
from tpshard.numerics.stores import rank_store
from tpshard.planrules import plan_verdict
from tpshard.shards import open_shards
from tpshard.source import open_source
from tpshard.verdicts import LevelVerdict

Made = tuple[Path, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A bfloat16 model with a padded vocabulary, and its shards for two ranks."""
    root = tmp_path_factory.mktemp("runtime")
    tiny_models.build("llama-vocab-101").to(torch.bfloat16).save_pretrained(root / "model")
    split(root / "model", root / "shards", 2)
    return root / "model", root / "shards"


def run(source: Path, shards: Path, **how: Any) -> LevelVerdict:
    return runtime(open_shards(shards), open_source(source), **how)


def command(made: Made, *words: str) -> list[str]:
    source, shards = made
    return ["-m", "tpshard", "verify", str(shards), "--against", str(source), "--level", "runtime", *words]


def test_processes_give_what_the_original_gives(made: Made) -> None:
    verdict = run(*made)
    assert verdict.verdict == "passed", verdict.findings
    assert verdict.mode == "local"
    assert verdict.collectives == {"all_reduce": 5, "all_gather": 1}
    width, vocabulary = 48, 101  # without the padding
    assert verdict.collective_bytes_per_token == 2 * (5 * width + vocabulary)
    assert verdict.collective_dtype == "BF16"
    assert verdict.collective_bytes_per_token == plan_verdict(open_shards(made[1]).manifest).collective_bytes_per_token
    assert verdict.logits["top1"] > 0.8
    points = {measure.point: measure for measure in verdict.measures}
    assert 1e-4 < points["logits"].error <= points["logits"].gate < 0.1
    assert "bfloat16" in points["logits"].note
    assert points["decode"].error <= points["decode"].gate
    assert points["all sums"].status == "pass"
    assert any("greedy" in note for note in verdict.notes)
    assert any("sums were compared between ranks" in note for note in verdict.notes)


def test_torchrun_starts_the_ranks_and_one_of_them_reports(made: Made, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *command(made, "--json")],
        capture_output=True, text=True, cwd=tmp_path, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one document: the other rank said nothing
    assert report["passed"] is True
    assert "runtime" in report["levels"]


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


@pytest.mark.skipif(not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists(), reason="needs Linux' /proc")
def test_a_rank_that_dies_ends_the_others_and_is_named(made: Made, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, *command(made)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        until = time.monotonic() + 60
        ranks: list[int] = []
        while len(ranks) < 2 and time.monotonic() < until:
            started = [pid for pid in children(process.pid) if b"tpshard.numerics.worker" in _cmdline(pid)]
            ranks = [rank for pid in started for rank in children(pid)] if processes.FORKS else started
            time.sleep(0.05)
        assert len(ranks) == 2
        victim = ranks[1]  # children are told in the order of their birth
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - killed < 20
    assert process.returncode == 5, (out, err)
    assert "rank 1 died (killed by SIGKILL)" in out + err
    assert not any(_cmdline(pid) for pid in [*started, *ranks])


@pytest.mark.skipif(not processes.FORKS, reason="ranks are forked on Linux alone")
def test_ranks_end_with_the_command_that_started_them(made: Made, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, *command(made)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    ) as process:
        until = time.monotonic() + 60
        ranks: list[int] = []
        while len(ranks) < 2 and time.monotonic() < until:
            ranks = [rank for pid in children(process.pid) for rank in children(pid)]
            time.sleep(0.05)
        assert len(ranks) == 2
        process.kill()
    until = time.monotonic() + 20
    while any(_cmdline(pid) for pid in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_cmdline(pid) for pid in ranks)


def test_ranks_that_cannot_be_forked_start_by_themselves(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FORKS", False)
    assert run(*made, new_tokens=2).verdict == "passed"


def test_no_more_tokens_than_positions(tmp_path: Path) -> None:
    """64 of them: what is generated ends with the table."""
    tiny_models.write("gpt2", tmp_path / "model")
    split(tmp_path / "model", tmp_path / "shards", 2)
    made = tmp_path / "model", tmp_path / "shards"
    with pytest.raises(UsageError, match=r"65 .*64 positions"):
        run(*made, tokens=65)
    verdict = run(*made, tokens=60)
    assert verdict.verdict == "passed", verdict.findings
    assert any("64 positions leaves room for 5 of 16 new tokens" in note for note in verdict.notes)
    assert any("5 greedy tokens are equal" in note or "a tie" in note for note in verdict.notes)


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_rank_opens_no_file_but_its_own(made: Made, tmp_path: Path) -> None:
    shards = Path(shutil.copytree(made[1], tmp_path / "shards"))
    opened = open_shards(shards)
    theirs = {name: part.full_shape for name, part in rank_store(opened, 1).parts.items()}
    next(path for file, path in zip(opened.manifest.files, opened.paths(), strict=True) if file.rank == 0).unlink()
    store = own_store(shards, opened.manifest, 1)
    assert {name: part.full_shape for name, part in store.parts.items()} == theirs
    for part in store.parts.values():
        assert torch.isfinite(store.local(part, torch.float32)).all()
    store.close()
    with pytest.raises(StorageError, match="No such file"):
        own_store(shards, opened.manifest, 0)


def test_a_file_of_another_split_is_refused(made: Made, tmp_path: Path) -> None:
    source, shards = made
    split(source, tmp_path / "other", 4)
    opened = open_shards(shards)
    folder = Path(shutil.copytree(shards, tmp_path / "shards"))
    for mine, other in zip(opened.manifest.files, open_shards(tmp_path / "other").paths(), strict=False):
        shutil.copy(other, folder / mine.name)
    with pytest.raises(DamagedError, match=r"not what tpshard\.json says"):
        own_store(folder, opened.manifest, 1)


def test_bad_calls(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="give at least 2"):
        run(*made, tokens=1)
    with pytest.raises(UsageError, match="native or fp32"):
        run(*made, compute="int8")
    with pytest.raises(UsageError, match="cpu or cuda"):
        place_of(0, 2, 0, 2, "tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no CUDA device"):
            run(*made, device="cuda")
        with pytest.raises(UnsupportedError, match="no CUDA device"):
            place_of(0, 2, 0, 2, "cuda")
    for name, value in _torchrun(0, 3).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="started 3 processes for shards of 2 ranks"):
        run(*made, mode="zero-pad")


def _torchrun(rank: int, size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "none"}


def test_what_torchrun_says_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched({}) is None
    assert launched({"RANK": "1", "WORLD_SIZE": "2"}) is None  # some other launcher's, or left over
    assert launched(_torchrun(1, 2)) == (1, 2, 1, 2)
    with pytest.raises(UsageError, match="no numbers"):
        launched(_torchrun(1, 2) | {"RANK": "one"})
    assert reports()
    for name, value in _torchrun(1, 2).items():
        monkeypatch.setenv(name, value)
    assert not reports()


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL with a GPU for every rank; ranks that share one exchange through the host."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    own, shared = place_of(1, 2, 1, 2, "cuda"), place_of(3, 4, 3, 4, "cuda")
    assert (own.device, own.backend) == (torch.device("cuda", 1), "nccl")
    assert (shared.device, shared.backend) == (torch.device("cuda", 1), "gloo")
    assert place_of(0, 4, 0, 4, "cpu").backend == "gloo"


def test_a_process_that_says_nothing_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that cannot even start: what it printed is in the message."""
    monkeypatch.setattr(processes, "WORKER", "tpshard.numerics.no_such_worker")
    for forks in {processes.FORKS, False}:
        monkeypatch.setattr(processes, "FORKS", forks)
        with pytest.raises(StorageError, match=r"rank \d died \(exit status 1\).*no_such_worker"):
            processes.run_all(2, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gpt_oss", "qwen3_moe", "deepseek_v3", "olmo2", "mamba2", "gemma3_text"]
)
def test_families_in_fp32_at_an_uneven_degree(name: str, tmp_path: Path) -> None:
    tiny_models.build(name).to(torch.float32).save_pretrained(tmp_path / "model")
    split(tmp_path / "model", tmp_path / "shards", 3)
    verdict = run(tmp_path / "model", tmp_path / "shards", compute="fp32")
    assert verdict.verdict == "passed", (verdict.findings, verdict.notes)
    assert any("16 greedy tokens are equal" in note or "a tie" in note for note in verdict.notes)


@pytest.mark.slow
def test_a_rank_that_fails_is_the_one_that_is_named(made: Made, tmp_path: Path) -> None:
    """Its file is gone when it comes to read it; the others end with it, long before they would give up waiting."""
    shards = Path(shutil.copytree(made[1], tmp_path / "shards"))
    opened, source = open_shards(shards), open_source(made[0])
    gone = next(path for file, path in zip(opened.manifest.files, opened.paths(), strict=True) if file.rank == 1)
    gone.unlink()
    began = time.monotonic()
    with pytest.raises(StorageError, match=gone.name):
        runtime(opened, source)
    assert time.monotonic() - began < processes.TIMEOUT / 2


@pytest.mark.slow
def test_a_fault_fails_and_every_process_of_torchrun_ends_with_its_status(made: Made, tmp_path: Path) -> None:
    source, good = made
    shards = Path(shutil.copytree(good, tmp_path / "shards"))
    test_local.replaced(shards, 1, "model.layers.1.self_attn.q_proj.weight", test_local._exchanged)
    verdict = run(source, shards)
    assert verdict.verdict == "failed"
    assert verdict.findings[0].tensor == "logits"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *command((source, shards))],
        capture_output=True, text=True, cwd=tmp_path, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout.count("logits differs from the original's") == 1
    assert "exitcode  : 1 " in done.stderr
    assert "exitcode  : 2 " not in done.stderr


@pytest.mark.gpu
def test_ranks_on_gpus(made: Made) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    verdict = run(*made, device="cuda")
    assert verdict.verdict == "passed", verdict.findings
    backend = "nccl" if torch.cuda.device_count() >= 2 else "gloo"
    assert any(f"over {backend} on cuda" in note for note in verdict.notes)
