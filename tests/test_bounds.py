"""Very many tensors, one very large, very many files: within 256 open files, and memory that the data don't drive."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ELSEWHERE
from weights import CONFIG, Tensor, llama_shapes, nbytes, tree, write, write_llama

# Runs commands with a limit of open files, and prints the highest anonymous memory above that of the imports.
PROBE = """
import json, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import click, numpy, xxhash, tpshard.cli, tpshard.convert, tpshard.check
from tpshard.registry import families
families()
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) >> 10
before, most, ended = anonymous(), 0, threading.Event()
def watch():
    global most
    while not ended.wait(0.01):
        most = max(most, anonymous())
watcher = threading.Thread(target=watch); watcher.start()
statuses = [tpshard.cli.run(words) for words in json.loads(sys.argv[1])]
ended.set(); watcher.join()
print(json.dumps([statuses, most - before]))
"""


def probed(*commands: list[object], timeout: float = 110) -> int:
    """Run commands, which must succeed; MiB of anonymous memory that they took at most."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", PROBE, words], **ELSEWHERE, capture_output=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    statuses, grown = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [0] * len(commands), done.stderr
    print(f"{grown} MiB")
    return int(grown)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def many_files(directory: Path, layers: int, files: int) -> Path:
    """A Llama of 64 tiny heads that takes 64 ranks, in so many files."""
    sizes = {"hidden_size": 64, "head_dim": 1, "num_attention_heads": 64, "num_key_value_heads": 64}
    return write_llama(
        directory, files=files, num_hidden_layers=layers, intermediate_size=64, vocab_size=64, **sizes
    )


def there_and_back(source: Path, folder: Path, timeout: float) -> int:
    """Split to 64 ranks, reshard, merge; the merge is the source."""
    grown = probed(
        ["split", source, folder / "a", "--tp", 64], ["reshard", folder / "a", folder / "b", "--tp", 48],
        ["merge", folder / "b", folder / "merged"], ["verify", folder / "a"], timeout=timeout,
    )  # fmt: skip
    assert tree(folder / "merged") == tree(source)
    return grown


def test_300_source_files_and_64_ranks(tmp_path: Path) -> None:
    assert there_and_back(many_files(tmp_path / "model", 35, 300), tmp_path, 110) < 160


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_1000_source_files_and_64_ranks(tmp_path: Path) -> None:
    assert there_and_back(many_files(tmp_path / "model", 112, 1000), tmp_path, 800) < 300


def mixture(directory: Path, layers: int) -> tuple[Path, int]:
    """A Qwen3-MoE of 128 tiny experts a layer, in one file; and how many tensors it has."""
    directory.mkdir()
    config: dict[str, Any] = CONFIG | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 16, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": layers, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "norm_topk_prob": True, "intermediate_size": 4, "vocab_size": 64,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in llama_shapes(config).items():
        if ".mlp." not in name:
            shapes[name] = shape
            continue
        if not name.endswith("gate_proj.weight"):
            continue
        at = name.removesuffix(".gate_proj.weight")
        shapes[f"{at}.gate.weight"] = (128, 16)
        for expert in range(128):
            for which, shape in (("gate", (4, 16)), ("up", (4, 16)), ("down", (16, 4))):
                shapes[f"{at}.experts.{expert}.{which}_proj.weight"] = shape
    for layer in range(layers):
        for which in ("q_norm", "k_norm"):
            shapes[f"model.layers.{layer}.self_attn.{which}.weight"] = (8,)
    (directory / "config.json").write_text(json.dumps(config))
    block = bytes(range(251)) * 20
    write(
        directory / "model.safetensors",
        {name: Tensor("BF16", shape, block[at % 97 :][: nbytes("BF16", shape)])
         for at, (name, shape) in enumerate(shapes.items())},
    )  # fmt: skip
    return directory, len(shapes)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_100_000_tensors(tmp_path: Path) -> None:
    """What grows with tensors is the plan, some 3 KiB for each of them on two ranks; the data don't count."""
    source, count = mixture(tmp_path / "model", 258)
    assert count > 100_000
    grown = probed(
        ["split", source, tmp_path / "two", "--tp", 2], ["merge", tmp_path / "two", tmp_path / "merged"],
        ["verify", tmp_path / "two", "--level", "digest"], timeout=1400,
    )  # fmt: skip
    assert tree(tmp_path / "merged") == tree(source)
    assert grown < 450


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_one_tensor_of_10_gb(tmp_path: Path) -> None:
    """A sparse file: 1,220,000 vocabulary rows of 4,096; memory is that of the buffers."""
    if shutil.disk_usage(tmp_path).free < 26 << 30:
        pytest.skip("needs 26 GB of disk")
    source = tmp_path / "model"
    source.mkdir()
    config = CONFIG | {
        "hidden_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16,
        "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 1_220_001, "tie_word_embeddings": True,
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in llama_shapes(config).items():
        if name != "lm_head.weight":
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes("BF16", shape)]}
            at += nbytes("BF16", shape)
    raw = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
        for place in range(8 + len(raw), 8 + len(raw) + at - 64, at // 1000):
            file.seek(place)
            file.write(place.to_bytes(8, "little") * 7)
    assert at > 9_990_000_000
    grown = probed(
        ["split", source, tmp_path / "three", "--tp", 3], ["merge", tmp_path / "three", tmp_path / "merged"],
        timeout=1400,
    )  # fmt: skip
    assert grown < 64
    same = subprocess.run(["cmp", source / "model.safetensors", tmp_path / "merged" / "model.safetensors"], check=False)
    assert same.returncode == 0
