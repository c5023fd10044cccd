"""Writes Hugging Face checkpoints with the shapes of real models and random contents, fast and without torch.

    python benchmarks/make_checkpoint.py llama-1b DIR          2.47 GB, 146 tensors, one file
    python benchmarks/make_checkpoint.py mixtral DIR           2.5 GB, 8 experts, three files with an index
    python benchmarks/make_checkpoint.py many-experts DIR      1.5 GB in 10,614 tensors, four files with an index
    python benchmarks/make_checkpoint.py tiny DIR              0.3 MB, 21 tensors
    --sparse: headers only; the tensor data are holes that read as zeros (for measuring planning)

Every file is laid out as safetensors' own writer does it: 8 bytes of header length, JSON padded with spaces to a
multiple of 8, tensors sorted by name. The contents are fresh random bytes throughout, so that no layer of storage can
compress or deduplicate them; as bfloat16 they are values of every size, infinities and NaNs included.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Tensor = tuple[str, tuple[int, ...]]
_CHUNK = 32 << 20


@dataclass(frozen=True)
class Model:
    """The sizes that decide the shapes of a decoder with grouped-query attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of one expert where there are experts
    vocab: int
    experts: int = 0
    tied: bool = False


def _attention(prefix: str, model: Model) -> Iterator[Tensor]:
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield f"{prefix}.self_attn.q_proj.weight", (query, model.hidden)
    yield f"{prefix}.self_attn.k_proj.weight", (kv, model.hidden)
    yield f"{prefix}.self_attn.v_proj.weight", (kv, model.hidden)
    yield f"{prefix}.self_attn.o_proj.weight", (model.hidden, query)
    yield f"{prefix}.input_layernorm.weight", (model.hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (model.hidden,)


def _gated(prefix: str, names: tuple[str, str, str], model: Model) -> Iterator[Tensor]:
    gate, up, down = names
    yield f"{prefix}.{gate}.weight", (model.intermediate, model.hidden)
    yield f"{prefix}.{up}.weight", (model.intermediate, model.hidden)
    yield f"{prefix}.{down}.weight", (model.hidden, model.intermediate)


def _llama_mlp(layer: str, model: Model) -> Iterator[Tensor]:
    yield from _gated(f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj"), model)


def _mixtral_experts(layer: str, model: Model) -> Iterator[Tensor]:
    yield f"{layer}.block_sparse_moe.gate.weight", (model.experts, model.hidden)
    for expert in range(model.experts):
        yield from _gated(f"{layer}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"), model)


def _qwen3_experts(layer: str, model: Model) -> Iterator[Tensor]:
    yield f"{layer}.self_attn.q_norm.weight", (model.head_dim,)
    yield f"{layer}.self_attn.k_norm.weight", (model.head_dim,)
    yield f"{layer}.mlp.gate.weight", (model.experts, model.hidden)
    for expert in range(model.experts):
        yield from _gated(f"{layer}.mlp.experts.{expert}", ("gate_proj", "up_proj", "down_proj"), model)


def _tensors(model: Model, mlp: Callable[[str, Model], Iterator[Tensor]]) -> Iterator[Tensor]:
    yield "model.embed_tokens.weight", (model.vocab, model.hidden)
    for number in range(model.layers):
        layer = f"model.layers.{number}"
        yield from _attention(layer, model)
        yield from mlp(layer, model)
    yield "model.norm.weight", (model.hidden,)
    if not model.tied:
        yield "lm_head.weight", (model.vocab, model.hidden)


@dataclass(frozen=True)
class Kind:
    """A checkpoint that can be made: its model, what its MLP looks like, its config, and the size limit of a file."""

    model: Model
    mlp: Callable[[str, Model], Iterator[Tensor]]
    config: dict[str, Any]
    file_bytes: int = 5_000_000_000


KINDS = {
    # Llama-3.2-1B, published as one file
    "llama-1b": Kind(
        Model(2048, 16, 32, 8, 64, 8192, 128256, tied=True),
        _llama_mlp,
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0},
    ),
    # Mixtral-8x7B, with a quarter of its width and 13 of its 32 layers
    "mixtral": Kind(
        Model(1024, 13, 16, 8, 64, 3584, 32000, experts=8),
        _mixtral_experts,
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2},
        1_000_000_000,
    ),
    # Qwen3-MoE's 128 separate experts a layer, small ones: what is measured is the cost of a tensor, not of a byte
    "many-experts": Kind(
        Model(512, 27, 16, 8, 64, 128, 32000, experts=128),
        _qwen3_experts,
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts_per_tok": 8},
        500_000_000,
    ),
    "tiny": Kind(
        Model(64, 2, 8, 8, 8, 128, 512),
        _llama_mlp,
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    ),
}


def make_checkpoint(name: str, out: Path, *, sparse: bool = False) -> None:
    """Writes the checkpoint ``name`` (a key of :data:`KINDS`) into ``out``, which must not exist or be empty."""
    kind = KINDS[name]
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        sys.exit(f"{out} is not empty: name a new directory")
    groups = _cut_into_files(list(_tensors(kind.model, kind.mlp)), kind.file_bytes)
    random = np.random.Generator(np.random.SFC64())
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file_name = "model.safetensors"
        if len(groups) > 1:
            file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_file(out / file_name, sorted(group), None if sparse else random)
        weight_map |= dict.fromkeys((tensor for tensor, _ in group), file_name)
    total = sum(_nbytes(shape) for group in groups for _, shape in group)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (out / "config.json").write_text(json.dumps(_config(kind), indent=2, sort_keys=True) + "\n")
    (out / "generation_config.json").write_text('{\n  "bos_token_id": 1,\n  "eos_token_id": 2\n}\n')
    print(f"{name}: {len(weight_map)} tensors, {total / 1e9:.2f} GB, files of weights: {len(groups)}")


def _config(kind: Kind) -> dict[str, Any]:
    model = kind.model
    config = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": 8192,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": model.tied,
        "torch_dtype": "bfloat16",
        "vocab_size": model.vocab,
    }
    if kind.mlp is _mixtral_experts:
        config["num_local_experts"] = model.experts
    elif kind.mlp is _qwen3_experts:
        config |= {"num_experts": model.experts, "moe_intermediate_size": model.intermediate, "mlp_only_layers": []}
        config |= {"decoder_sparse_step": 1, "norm_topk_prob": True}
    return config | kind.config


def _nbytes(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)  # bfloat16


def _cut_into_files(tensors: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Fills files in model order, each up to ``limit`` bytes."""
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        nbytes = _nbytes(tensor[1])
        if groups[-1] and filled + nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += nbytes
    return groups


def _write_file(path: Path, tensors: list[Tensor], random: np.random.Generator | None) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        start, end = end, end + _nbytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if random is None:
            file.truncate(8 + len(text) + end)
            return
        for start in range(0, end, _CHUNK):
            # 8 bytes at a time is several times faster than Generator.bytes; the surplus of the last word is cut off
            nbytes = min(_CHUNK, end - start)
            file.write(random.integers(0, 2**64, -(-nbytes // 8), dtype=np.uint64).view(np.uint8)[:nbytes].data)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sparse", action="store_true", help="headers only; the data are holes")
    arguments = parser.parse_args()
    make_checkpoint(arguments.kind, arguments.out, sparse=arguments.sparse)


if __name__ == "__main__":
    main()
