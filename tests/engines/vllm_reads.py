"""Has vLLM's own loaders read an export and the checkpoint it was made of, and compares every tensor. On a CPU.

    PYTHON_WITH_VLLM tests/engines/vllm_reads.py JOBS.json

``JOBS.json`` is a list of ``{"checkpoint", "export", "tp", "pp", "experts"}``; ``experts`` says whether whole experts
are dealt. For every rank a line of JSON is printed: the class that vLLM made, how many tensors it has, and which of
them differ between the model that ``ShardedStateLoader`` filled from the export and the one that vLLM's usual loader
filled from the checkpoint. What a loader does not fill is NaN, and so differs from everything, itself included.

Only vLLM's Python layer takes part: models are built and filled, and nothing is computed. Nothing of tpshard is used.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
import vllm.model_executor.models.registry as registry
import vllm.platforms
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype

vllm.platforms._current_platform = CpuPlatform()
registry._run_in_subprocess = lambda inspect: inspect()  # a fresh interpreter for every class takes a minute


def model_config_of(checkpoint: str) -> ModelConfig:
    values = json.loads((Path(checkpoint) / "config.json").read_text())
    config = ModelConfig(
        model=checkpoint, tokenizer=checkpoint, skip_tokenizer_init=True, dtype=values["torch_dtype"],
        max_model_len=64, enforce_eager=True,
    )  # fmt: skip
    config.registry.resolve_model_cls(config.architectures, config)  # before the fork: imports of seconds
    return config


def built(config: VllmConfig, dtype: torch.dtype) -> torch.nn.Module:
    config.compilation_config.static_forward_context.clear()
    with set_default_torch_dtype(dtype):
        model = initialize_model(vllm_config=config)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    return model


def rank_of(job: dict[str, Any], rank: int, model_config: ModelConfig, port: int) -> dict[str, Any]:
    """What one rank finds."""
    world = job["tp"] * job["pp"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ["WORLD_SIZE"] = str(world)
    parallel = ParallelConfig(
        tensor_parallel_size=job["tp"], pipeline_parallel_size=job["pp"], rank=rank,
        distributed_executor_backend="mp", enable_expert_parallel=job["experts"],
    )  # fmt: skip
    config = VllmConfig(
        model_config=model_config, parallel_config=parallel, device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(load_format="auto", use_tqdm_on_load=False),
    )  # fmt: skip
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, "env://", rank, "gloo")
        ensure_model_parallel_initialized(job["tp"], job["pp"])
        usual = built(config, model_config.dtype)
        DefaultModelLoader(config.load_config).load_weights(usual, model_config)
        sharded = built(config, model_config.dtype)
        loader = ShardedStateLoader(LoadConfig(load_format="sharded_state", use_tqdm_on_load=False))
        loader.load_weights(sharded, SimpleNamespace(model=job["export"], model_weights=None, revision=None))
        wanted, found = usual.state_dict(), sharded.state_dict()
        differ = [name for name, value in wanted.items() if name not in found or not torch.equal(value, found[name])]
        torch.distributed.barrier()
    return {"class": type(usual).__name__, "tensors": len(wanted), "differ": differ}


def run(number: int, job: dict[str, Any], port: int) -> None:
    """One forked process a rank; a rank that fails says why, and its peers are ended."""
    model_config, pids = model_config_of(job["checkpoint"]), []
    for rank in range(job["tp"] * job["pp"]):
        sys.stdout.flush()
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            result = rank_of(job, rank, model_config, port)
        except BaseException as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        line = json.dumps({"job": number, "rank": rank, **result})
        os.write(1, f"\n{line}\n".encode())  # at once: ranks must not write into each other's lines
        os._exit("error" in result)
    failed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status and not failed:
            failed = True
            for other in pids:
                os.kill(other, 9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    first = 20000 + os.getpid() % 20000
    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        run(number, job, first + number)
