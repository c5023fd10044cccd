"""vLLM's own loaders read our files: nothing missing, and every tensor as its usual loader makes it of the checkpoint.

    TPSHARD_VLLM_PYTHON=/path/to/python pytest -m engine tests/test_vllm_reads.py

The interpreter named needs vLLM's Python layer and no GPU; it runs ``tests/engines/vllm_reads.py``. One process does
all models, since importing vLLM takes most of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import enginemodels as models
import pytest

from tpshard.exporting.export import export

PYTHON = os.environ.get("TPSHARD_VLLM_PYTHON", "")
SCRIPT = Path(__file__).parent / "engines" / "vllm_reads.py"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="needs TPSHARD_VLLM_PYTHON, the interpreter of an environment with vLLM"),
]

Maker = Callable[[Path], Any]
CASES: dict[str, tuple[Maker, dict[str, int]]] = {
    "dense": (models.llama, {"tp_size": 2}),
    "dense on one rank": (models.llama, {"tp_size": 1}),
    "tied": (lambda at: models.llama(at, tied=True), {"tp_size": 2}),
    "replicated KV heads": (models.llama, {"tp_size": 4}),
    "one KV head on eight ranks": (lambda at: models.llama(at, kv=1), {"tp_size": 8}),
    "biases": (lambda at: models.llama(at, model_type="qwen2", bias=True), {"tp_size": 4}),
    "norms of heads": (lambda at: models.llama(at, model_type="qwen3", norms=True), {"tp_size": 2}),
    "stages": (models.llama, {"tp_size": 2, "pp_size": 2}),
    "stages of a tied model": (lambda at: models.llama(at, tied=True), {"tp_size": 2, "pp_size": 2}),
    "experts": (models.qwen3_moe, {"tp_size": 2}),
    "stacked experts": (lambda at: models.qwen3_moe(at, stacked=True), {"tp_size": 2}),
    "whole experts": (models.qwen3_moe, {"tp_size": 2, "ep_size": 2}),
    "Mixtral": (models.mixtral, {"tp_size": 2}),
    "latent attention": (models.deepseek_v3, {"tp_size": 2}),
    "latent attention, stages, whole experts": (models.deepseek_v3, {"tp_size": 2, "pp_size": 2, "ep_size": 2}),
}


HIDDEN = models.HEADS * models.SIZE
"""vLLM's kernel of experts on a CPU wants a multiple of 32, its Qwen2 heads that are together as wide as the model."""


def in_bf16(directory: Path) -> None:
    """Rewrite a checkpoint in the dtype that vLLM has kernels of experts for on a CPU."""
    import torch
    from safetensors.torch import load_file, save_file

    name, config = directory / "model.safetensors", directory / "config.json"
    save_file({key: value.to(torch.bfloat16) for key, value in load_file(name).items()}, name, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "torch_dtype": "bfloat16"}))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of every case reported."""
    at, jobs = tmp_path_factory.mktemp("reads"), []
    for number, (make, degrees) in enumerate(CASES.values()):
        source, out = at / f"{number}-hf", at / f"{number}-out"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "HIDDEN", HIDDEN)
            make(source)
        in_bf16(source)
        export(source, out, "vllm", **degrees)
        jobs.append({
            "checkpoint": str(source), "export": str(out), "tp": degrees["tp_size"], "pp": degrees.get("pp_size", 1),
            "experts": "ep_size" in degrees,
        })  # fmt: skip
    (at / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([PYTHON, SCRIPT, at / "jobs.json"], capture_output=True, text=True, timeout=1500)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return {name: [line for line in lines if line["job"] == number] for number, name in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_as_vllm_loads_the_checkpoint(found: dict[str, list[dict[str, Any]]], case: str) -> None:
    degrees, ranks = CASES[case][1], found[case]
    assert [rank.get("error") for rank in ranks if "error" in rank] == []
    assert sorted(rank["rank"] for rank in ranks) == list(range(degrees["tp_size"] * degrees.get("pp_size", 1)))
    assert all(rank["tensors"] > 12 for rank in ranks)
    assert {name for rank in ranks for name in rank["differ"]} == set()
