"""Small models in a quantisation scheme, whose biases say which rows and columns every rank holds.

A bias counts the rows of its matrix, so that the part of a matrix on a rank is known without a word about quantisation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from quantschemes import Array, Parts, Scheme, numbers
from weights import CONFIG, Tensor, llama_shapes, tensor, write

Tensors = dict[str, Tensor]


class Matrix(NamedTuple):
    """A quantised matrix: its module, its size, and the tensors that count its rows and columns ("": all are there)."""

    module: str
    out: int
    into: int
    rows: str = ""
    columns: str = ""


def llama(heads: int, kv_heads: int, head_dim: int, ffn: int, hidden: int, vocab: int) -> dict[str, Any]:
    """The config of a Llama with biases and one layer."""
    return CONFIG | {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": hidden,
        "intermediate_size": ffn, "vocab_size": vocab, "num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True,
    }  # fmt: skip


def llama_matrices(config: Mapping[str, Any]) -> Iterator[Matrix]:
    hidden, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    at = "model.layers.0"
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        module = f"{at}.self_attn.{name}_proj"
        yield Matrix(module, rows, hidden, f"{module}.bias")
    yield Matrix(f"{at}.self_attn.o_proj", hidden, q, columns=f"{at}.self_attn.q_proj.bias")
    for name in ("gate", "up"):
        module = f"{at}.mlp.{name}_proj"
        yield Matrix(module, ffn, hidden, f"{module}.bias")
    yield Matrix(f"{at}.mlp.down_proj", hidden, ffn, columns=f"{at}.mlp.up_proj.bias")
    yield Matrix("lm_head", config["vocab_size"], hidden, "model.embed_tokens.weight")


def gpt2(heads: int, head_dim: int, ffn: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": heads * head_dim, "n_head": heads, "n_layer": 1, "vocab_size": vocab,
        "n_positions": 8, "n_inner": ffn, "tie_word_embeddings": True,
    }  # fmt: skip


def gpt2_matrices(config: Mapping[str, Any]) -> Iterator[Matrix]:
    """Matrices that the model stores ``[in, out]``; here they are as every other."""
    hidden, ffn, at = config["n_embd"], config["n_inner"], "transformer.h.0"
    yield Matrix(f"{at}.attn.c_attn", 3 * hidden, hidden, f"{at}.attn.c_attn.bias")
    yield Matrix(f"{at}.attn.c_proj", hidden, hidden, columns=f"{at}.attn.c_attn.bias")
    yield Matrix(f"{at}.mlp.c_fc", ffn, hidden, f"{at}.mlp.c_fc.bias")
    yield Matrix(f"{at}.mlp.c_proj", hidden, ffn, columns=f"{at}.mlp.c_fc.bias")


def plain(config: Mapping[str, Any]) -> Tensors:
    """What is not quantised: norms, embeddings, and biases that count."""
    counted: dict[str, tuple[int, ...]] = {}
    if config["model_type"] == "llama":
        counted = {n: s for n, s in llama_shapes(config).items() if "norm" in n or "embed" in n}
        biased: Any = llama_matrices(config)
    else:
        hidden, at = config["n_embd"], "transformer.h.0"
        counted = {"transformer.wte.weight": (config["vocab_size"], hidden), "transformer.wpe.weight": (8, hidden)}
        for norm in (f"{at}.ln_1", f"{at}.ln_2", "transformer.ln_f"):
            counted |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
        biased = gpt2_matrices(config)
    counted |= {f"{matrix.module}.bias": (matrix.out,) for matrix in biased if matrix.module != "lm_head"}
    rows = {name: np.arange(shape[0], dtype=np.float32) for name, shape in counted.items()}
    return {
        name: tensor(np.broadcast_to(rows[name].reshape(-1, *[1] * (len(shape) - 1)), shape), "F32")
        for name, shape in counted.items()
    }


def matrices_of(config: Mapping[str, Any]) -> list[Matrix]:
    return list((llama_matrices if config["model_type"] == "llama" else gpt2_matrices)(config))


def write_quantised(
    directory: Path, config: Mapping[str, Any], scheme: Scheme, *, seed: int = 0,
    extra: Mapping[str, Tensor] | None = None, but: tuple[str, ...] = (),
) -> dict[str, Array]:  # fmt: skip
    """A checkpoint whose matrices are all quantised ``but`` some; returns what a reader makes of each, by module."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(seed)
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": dict(scheme.config)}))
    tensors, values = plain(config), {}
    for matrix in matrices_of(config):
        if matrix.module.endswith(but):
            tensors[f"{matrix.module}.weight"] = tensor(np.zeros((matrix.out, matrix.into), np.float32), "F32")
            continue
        parts = scheme.store(random, matrix.out, matrix.into)
        tensors |= {matrix.module + suffix: stored for suffix, stored in parts.items()}
        values[matrix.module] = scheme.read(parts, matrix.out, matrix.into)
    write(directory / "model.safetensors", tensors | dict(extra or {}))
    return values


def parts_of(tensors: Tensors, module: str) -> Parts:
    """The tensors of a module by suffix."""
    return {name.removeprefix(module): found for name, found in tensors.items() if name.startswith(module + ".")}


def require_slices(
    config: Mapping[str, Any], scheme: Scheme, values: Mapping[str, Array], ranks: list[Tensors]
) -> None:
    """What a reader makes of every rank's tensors is the slice that the rank's biases name; padding reads as zeros."""
    for matrix in matrices_of(config):
        held = []
        for tensors in ranks:
            rows, columns = (counted(tensors, name, length) for name, length in
                             ((matrix.rows, matrix.out), (matrix.columns, matrix.into)))  # fmt: skip
            if matrix.module.endswith("attn.c_proj"):  # q, k and v are counted through
                columns = columns[columns < matrix.into]
            found = scheme.read(parts_of(tensors, matrix.module), len(rows), len(columns))
            padding = padded(rows) if matrix.rows else np.zeros(len(rows), bool)
            due = values[matrix.module][np.ix_(rows[~padding], columns)]
            assert np.array_equal(found[~padding], due), matrix.module
            assert not scheme.zeros or not found[padding].any(), matrix.module
            held.append((rows[~padding], columns))
        for corner in ((0, 0), (matrix.out - 1, matrix.into - 1)):
            assert any(corner[0] in rows and corner[1] in columns for rows, columns in held), matrix.module


def counted(tensors: Tensors, name: str, length: int) -> Array:
    if not name:
        return np.arange(length)
    found = numbers(tensors[name])
    return (found if found.ndim == 1 else found[:, 0]).astype(int)


def padded(rows: Array) -> Array:
    """Which rows are padding: zeros that are no first row."""
    found = rows == 0
    found[:1] &= len(rows) > 1 and rows[1] != 1
    return found
