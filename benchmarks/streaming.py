"""Verifies a model that is larger than the memory allowed, and names two faults in it.

    python benchmarks/streaming.py make DIR             DIR/source: 2.3 GB of bfloat16, 24 layers, hidden 2048
    python benchmarks/streaming.py split DIR            DIR/shards: eight ranks
    python benchmarks/streaming.py damage DIR           a wrong KV replica in layer 17, one bit in layer 9
    python benchmarks/streaming.py verify DIR [--compute fp64] [--tokens 16] [--limit-mb 1800]

``verify`` prints verdict, findings, peak memory, time, and bytes read as JSON; with ``--limit-mb`` it runs under
RLIMIT_DATA, which counts the heap and private mappings. ``plain`` runs the source alone, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, RANKS = 24, 2048, 5632, 32000, 16, 4, 128, 8


def _tensors() -> list[tuple[str, tuple[int, ...]]]:
    out: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCAB, HIDDEN))]
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        out += [
            (f"{layer}.input_layernorm.weight", (HIDDEN,)),
            (f"{layer}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)),
            (f"{layer}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
            (f"{layer}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
            (f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)),
            (f"{layer}.post_attention_layernorm.weight", (HIDDEN,)),
            (f"{layer}.mlp.gate_proj.weight", (FFN, HIDDEN)),
            (f"{layer}.mlp.up_proj.weight", (FFN, HIDDEN)),
            (f"{layer}.mlp.down_proj.weight", (HIDDEN, FFN)),
        ]
    return [*out, ("model.norm.weight", (HIDDEN,)), ("lm_head.weight", (VOCAB, HIDDEN))]


def make(root: Path) -> None:
    """Write the source; the values are Gaussian, rounded to bfloat16 by dropping bits."""
    import numpy as np

    from tpshard.header import build_header

    out = root / "source"
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tensors = _tensors()
    random = np.random.default_rng(0)
    with (out / "model.safetensors").open("wb") as file:
        file.write(build_header([(name, "BF16", shape) for name, shape in tensors], {"format": "pt"}))
        for _, shape in tensors:
            count = int(np.prod(shape))
            for start in range(0, count, 1 << 22):
                values = random.standard_normal(min(1 << 22, count - start), dtype=np.float32)
                values = 1 + 0.2 * values if len(shape) == 1 else values * (0.8 / shape[-1] ** 0.5)
                file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def split_it(root: Path) -> None:
    """Cut the source over the ranks."""
    from tpshard.convert import split
    from tpshard.options import Options

    split(root / "source", root / "shards", RANKS, options=Options(overwrite=True))


def damage(root: Path) -> None:
    """Rank 5 gets the keys and values of another group in layer 17; one bit of rank 6 changes in layer 9."""
    from tpshard.numerics.stores import rank_store
    from tpshard.shards import open_shards

    shards = open_shards(root / "shards")

    def place(rank: int, name: str) -> tuple[Path, int, int]:
        store = rank_store(shards, rank)
        part = store.parts[name]
        store.close()
        return shards.paths()[part.file], part.offset, 2 * part.shape[0] * part.shape[1]

    for letter in "kv":
        name = f"model.layers.17.self_attn.{letter}_proj.weight"
        path, at, size = place(0, name)
        with path.open("rb") as file:
            file.seek(at)
            data = file.read(size)
        path, at, _ = place(5, name)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data)
    path, at, size = place(6, "model.layers.9.mlp.down_proj.weight")
    with path.open("r+b") as file:
        file.seek(at + size // 2)
        byte = file.read(1)[0]
        file.seek(at + size // 2)
        file.write(bytes([byte ^ 1]))


class _Peak(threading.Thread):
    """The largest anonymous memory seen, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.on = 0, True

    def run(self) -> None:
        while self.on:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    self.peak = max(self.peak, int(line.split()[1]) << 10)
            time.sleep(0.02)


def verify(root: Path, compute: str, tokens: int, limit_mb: int, plain: bool) -> dict[str, Any]:
    """Run the level, or the plain model, and report."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(1)
    import transformers

    from tpshard.numerics.forward import forward
    from tpshard.shards import open_shards
    from tpshard.source import open_source

    if limit_mb:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mb << 20, limit_mb << 20))
    peak = _Peak()
    peak.start()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    out: dict[str, Any] = {"compute": compute, "tokens": tokens, "limit_mb": limit_mb, "plain": plain}
    if plain:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            root / "source", dtype={"fp64": torch.float64, "fp32": torch.float32}[compute]
        )
        with torch.no_grad():
            model(input_ids=torch.arange(3 * tokens).view(3, tokens) * 13, use_cache=False)
    else:
        verdict = forward(open_shards(root / "shards"), open_source(root / "source"), compute=compute, tokens=tokens)
        out |= {
            "verdict": verdict.verdict,
            "findings": [finding.message for finding in verdict.findings],
            "floor": max(m.error for m in verdict.measures if m.status == "pass" and m.rank is None),
            "coverage": verdict.coverage,
            "measures": len(verdict.measures),
        }
    peak.on = False
    after = resource.getrusage(resource.RUSAGE_SELF)
    return out | {
        "seconds": round(time.monotonic() - started, 1),
        "cpu_user": round(after.ru_utime - before.ru_utime, 1),
        "cpu_system": round(after.ru_stime - before.ru_stime, 1),
        "peak_anonymous_mb": peak.peak >> 20,
        "read_mb": int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0]) >> 20,
        "source_mb": (root / "source" / "model.safetensors").stat().st_size >> 20,
        "shards_mb": sum(f.stat().st_size for f in (root / "shards").glob("*.safetensors")) >> 20,
    }


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "split", "damage", "verify", "plain"))
    parser.add_argument("root", type=Path)
    parser.add_argument("--compute", default="fp64")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--limit-mb", type=int, default=0)
    given = parser.parse_args()
    if given.what in ("verify", "plain"):
        result = verify(given.root, given.compute, given.tokens, given.limit_mb, given.what == "plain")
        print(json.dumps(result, indent=1))
    else:
        {"make": make, "split": split_it, "damage": damage}[given.what](given.root)


if __name__ == "__main__":
    main()
