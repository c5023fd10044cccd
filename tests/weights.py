"""Reads and writes safetensors files by the letter of the format, and makes Llamas: neither torch nor tpshard.

Tensors are numpy arrays of unsigned integers of the dtype's size, so that equality is that of bytes:
NaN and -0.0 count.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1, "U8": 1, "I8": 1,
}  # fmt: skip
HALF_BYTES = {"F4": 1}  # two values a byte


class Tensor(NamedTuple):
    """A stored tensor: its dtype as the header names it, and its bytes by index."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def array(self) -> Any:
        return np.frombuffer(self.data, f"<u{BYTES[self.dtype]}").reshape(self.shape)


def tensor(array: Any, dtype: str) -> Tensor:
    return Tensor(dtype, array.shape, np.ascontiguousarray(array).tobytes())


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = math.prod(shape)
    return count // 2 if dtype in HALF_BYTES else count * BYTES[dtype]


def header_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        found: dict[str, Any] = json.loads(file.read(length))
    return found


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file."""
    header = header_of(path)
    header.pop("__metadata__", None)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    out = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        out[name] = Tensor(entry["dtype"], tuple(entry["shape"]), raw[start + begin : start + end])
    return out


def read_all(directory: Path) -> dict[str, Tensor]:
    """All tensors of all safetensors files in a directory; no name may come twice."""
    out: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found = read(path)
        assert not out.keys() & found.keys()
        out |= found
    return out


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file with the tensors in the given order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for name, stored in tensors.items():
        header[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [at, at + len(stored.data)]}
        at += len(stored.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for stored in tensors.values():
            file.write(stored.data)


def write_index(directory: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """The files and their index."""
    for name, tensors in files.items():
        write(directory / name, tensors)
    total = sum(len(stored.data) for tensors in files.values() for stored in tensors.values())
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama with this config, by name."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        out |= {
            f"{at}.self_attn.q_proj.weight": (q, hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, q),
            f"{at}.mlp.gate_proj.weight": (ffn, hidden),
            f"{at}.mlp.up_proj.weight": (ffn, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ffn),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "head_dim": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "vocab_size": 53,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}


def write_llama(
    directory: Path, *, files: int = 1, seed: int = 0, dtype: str = "BF16", dtypes: Mapping[str, str] | None = None,
    extra: Mapping[str, Tensor] | None = None, **config: Any,
) -> Path:  # fmt: skip
    """A Llama of random bytes, which hold every kind of NaN, in one file or several with an index.

    It takes degrees 1 to 8; 1, 2, 4 give equal ranks. ``dtypes`` gives single tensors another dtype.
    """
    directory.mkdir(parents=True)
    whole = CONFIG | config
    (directory / "config.json").write_text(json.dumps(whole, indent=2))
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in llama_shapes(whole).items():
        kind = (dtypes or {}).get(name, dtype)
        tensors[name] = Tensor(kind, shape, random.bytes(nbytes(kind, shape)))
    tensors |= extra or {}
    if files == 1:
        write(directory / "model.safetensors", tensors)
        return directory
    names = list(tensors)
    parts = [names[len(names) * n // files : len(names) * (n + 1) // files] for n in range(files)]
    numbered = {
        f"model-{n:05d}-of-{files:05d}.safetensors": {name: tensors[name] for name in part}
        for n, part in enumerate(parts, 1)
    }
    write_index(directory, numbered)
    return directory


def tree(directory: Path, *, but: Iterable[str] = ()) -> dict[str, str]:
    """sha256 of every file below a directory, by its path."""
    left = set(but)
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in left
    }


def ranks(directory: Path) -> list[dict[str, Tensor]]:
    """The tensors of every rank of a native output, rank 0 first."""
    by_rank: dict[int, dict[str, Tensor]] = {}
    for path in directory.glob("model-tp-*.safetensors"):
        by_rank.setdefault(int(path.name.split("-")[2]), {}).update(read(path))
    return [by_rank[rank] for rank in sorted(by_rank)]
