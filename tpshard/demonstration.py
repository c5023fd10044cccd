"""A tiny model made on the spot, split four ways, resharded twice, merged, and the merge proven equal."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .check import verify
from .convert import merge, reshard, split
from .errors import UsageError
from .header import build_header
from .reports import Check, Conversion, Demonstration, Step
from .sidefiles import file_sha256

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "head_dim": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 250,
    "num_hidden_layers": 4,
    "vocab_size": 1003,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the demonstration's model, by name."""
    hidden, size, ffn, vocab = 96, 16, 250, 1003
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(4):
        at = f"model.layers.{layer}"
        out |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (6 * size, hidden),
            f"{at}.self_attn.k_proj.weight": (2 * size, hidden),
            f"{at}.self_attn.v_proj.weight": (2 * size, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, 6 * size),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.gate_proj.weight": (ffn, hidden),
            f"{at}.mlp.up_proj.weight": (ffn, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ffn),
        }
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write_model(directory: Path, seed: int = 0) -> None:
    """Write a Llama of 6 query and 2 KV heads with random bf16 weights in two files and an index."""
    directory.mkdir(parents=True)
    random_bytes = random.Random(seed)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    names = list(shapes())
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map, total = {}, 0
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        with (directory / file).open("wb") as out:
            out.write(build_header([(name, "BF16", shapes()[name]) for name in half], {"format": "pt"}))
            for name in half:
                count = 1
                for length in shapes()[name]:
                    count *= length
                # bf16 of moderate size: sign and mantissa at random, the exponent near that of 0.02
                data = bytearray(random_bytes.randbytes(2 * count))
                data[1::2] = bytes((byte & 0x80) | 0x3C for byte in data[1::2])
                out.write(data)
                weight_map[name] = file
                total += 2 * count
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def demo(keep: str | os.PathLike[str] | None = None) -> Demonstration:
    """Split 4 ways, reshard 4->3 and 3->2, merge, and compare every file with the original.

    Raises:
        UsageError: ``keep`` names a directory that exists and is not empty.
        StorageError: no space or no permission.
    """
    with _place_for(keep) as root:
        report = Demonstration("demo", "" if keep is None else str(root))
        source = root / "model"
        write_model(source)
        _step(report, "split to 4", lambda: split(source, root / "tp4", 4))
        _step(report, "reshard 4->3", lambda: reshard(root / "tp4", root / "tp3", 3))
        _step(report, "reshard 3->2", lambda: reshard(root / "tp3", root / "tp2", 2))
        _step(report, "merge 2->1", lambda: merge(root / "tp2", root / "merged"))
        split(source, root / "direct", 2)
        same = _digests(source) == _digests(root / "merged")
        report.checks.append(Check("every merged file has the sha256 of the original's", same))
        again = _digests(root / "tp2") == _digests(root / "direct")
        report.checks.append(Check("4->3->2 gave the very files of a direct split to 2", again))
        claim = "verify: structure, digest and bytes of the 3 ranks match the original"
        report.checks.append(Check(claim, verify(root / "tp3", against=source).passed))
        report.passed = all(check.passed for check in report.checks)
    return report


@contextlib.contextmanager
def _place_for(keep: str | os.PathLike[str] | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="tpshard-demo-") as name:
            yield Path(name)
        return
    from .commit import Staging

    if os.path.isdir(keep) and os.listdir(keep):
        raise UsageError(f"{os.fspath(keep)}: exists and isn't empty. Name a new directory for --keep.")
    with Staging(Path(keep), overwrite=False, needed_bytes=8 << 20) as staging:
        yield staging.path
        staging.publish()


def _step(report: Demonstration, name: str, convert: Callable[[], Conversion]) -> None:
    began = time.perf_counter()
    done = convert()
    seconds = time.perf_counter() - began
    report.steps.append(Step(name, done.to_tp_size, len(done.files), sum(done.rank_bytes), seconds))


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in sorted(directory.iterdir())}
