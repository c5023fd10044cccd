"""vLLM's rules written out by hand: what a rank holds of a checkpoint. No table takes part."""

from __future__ import annotations

import numpy as np
from enginemodels import EXPERTS, KV, SIZE, Tensors


def chunk(value: np.ndarray, dim: int, rank: int, tp: int) -> np.ndarray:
    return np.split(value, tp, dim)[rank]


def padded(value: np.ndarray, rank: int, tp: int) -> np.ndarray:
    rows = -(-len(value) // 64) * 64
    return chunk(np.concatenate([value, np.zeros((rows - len(value), value.shape[1]), value.dtype)]), 0, rank, tp)


def kv_rows(value: np.ndarray, rank: int, tp: int, kv: int) -> np.ndarray:
    if tp <= kv:
        return chunk(value, 0, rank, tp)
    head = rank // (tp // kv)
    return value[head * SIZE : (head + 1) * SIZE]


def attention(held: Tensors, source: Tensors, at: str, rank: int, tp: int, kv: int = KV) -> None:
    """The rules of ``QKVParallelLinear`` and ``RowParallelLinear``."""
    for kind in ("weight", "bias"):
        if f"{at}.q_proj.{kind}" in source:
            q, k, v = (source[f"{at}.{name}_proj.{kind}"] for name in "qkv")
            parts = [chunk(q, 0, rank, tp), kv_rows(k, rank, tp, kv), kv_rows(v, rank, tp, kv)]
            held[f"{at}.qkv_proj.{kind}"] = np.concatenate(parts)
    held[f"{at}.o_proj.weight"] = chunk(source[f"{at}.o_proj.weight"], 1, rank, tp)
    for name in ("q_norm.weight", "k_norm.weight"):
        if f"{at}.{name}" in source:
            held[f"{at}.{name}"] = source[f"{at}.{name}"]
    for name in "kvq":
        held[f"{at}.attn._{name}_scale"] = np.float32(1)
    held[f"{at}.attn._prob_scale"] = np.float32(1)


def mlp(held: Tensors, source: Tensors, at: str, rank: int, tp: int, to: str = "") -> None:
    gate, up = (chunk(source[f"{at}.{name}_proj.weight"], 0, rank, tp) for name in ("gate", "up"))
    held[f"{to or at}.gate_up_proj.weight"] = np.concatenate([gate, up])
    held[f"{to or at}.down_proj.weight"] = chunk(source[f"{at}.down_proj.weight"], 1, rank, tp)


def experts(held: Tensors, source: Tensors, at: str, rank: int, tp: int, whole: range | None = None) -> None:
    """``FusedMoE``: every expert cut, or with ``whole`` these experts and no cut."""
    own = range(EXPERTS) if whole is None else whole
    first, second = [], []
    for expert in own:
        gate, up, down = (source[f"{at}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        if whole is None:
            gate, up, down = chunk(gate, 0, rank, tp), chunk(up, 0, rank, tp), chunk(down, 1, rank, tp)
        first.append(np.concatenate([gate, up]))
        second.append(down)
    if first:
        held[f"{at}.routed_experts.w13_weight"] = np.stack(first)
        held[f"{at}.routed_experts.w2_weight"] = np.stack(second)


def norms(held: Tensors, source: Tensors, at: str) -> None:
    for name in ("input_layernorm", "post_attention_layernorm"):
        held[f"{at}.{name}.weight"] = source[f"{at}.{name}.weight"]


def ends(held: Tensors, source: Tensors, rank: int, tp: int, first: bool = True, last: bool = True) -> None:
    embed = source["model.embed_tokens.weight"]
    if first and ("lm_head.weight" in source or not last):
        held["model.embed_tokens.weight"] = padded(embed, rank, tp)
    if last:
        held["lm_head.weight"] = padded(source.get("lm_head.weight", embed), rank, tp)
        held["model.norm.weight"] = source["model.norm.weight"]


def require_same(found: Tensors, wanted: Tensors) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].shape == np.shape(value), name
        assert np.array_equal(found[name], value), name
