"""Scales of the KV cache: one value for a layer, or one a head, beside the matrices or at the attention itself.

Names: ``self_attn.k_scale`` and ``self_attn.attn.k_scale`` (vLLM, compressed-tensors), ``k_proj.k_scale`` (ModelOpt),
``self_attn.kv_scale`` (AutoFP8), ``k_cache_scale`` (Gemma). One value for all heads is whole on every rank; where
every head has its own, they are cut with the heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from tpshard.axes import Dim, Heads, replicated
from tpshard.errors import UnsupportedError, short
from tpshard.matching import Logical
from tpshard.table import Rule

_OF_QUERIES = frozenset({"q_scale", "q_zero_point"})
_NAMES = _OF_QUERIES | {
    "k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point", "prob_scale", "k_cache_scale", "v_cache_scale",
    "k_global_scale", "v_global_scale", "q_global_scale",
}  # fmt: skip


def is_cache_scale(name: str) -> bool:
    """Whether a tensor's name is that of a scale of the KV cache."""
    return name.rpartition(".")[2] in _NAMES


def cache_rules(
    scales: Sequence[Logical], dims: Mapping[str, Sequence[Dim]]
) -> dict[str, tuple[Rule, tuple[Dim, ...]]]:
    """The rule and dimensions of scales of the KV cache, by the heads of the attention around them.

    Raises:
        UnsupportedError: there are several values, and not one for every head of that attention.
    """
    around = _attentions(dims) if scales else {}
    out = {}
    known: dict[object, tuple[Rule, tuple[Dim, ...]]] = {}
    for tensor in scales:
        place = tensor.name.rpartition(".")[0]
        heads = around.get(place) or around.get(place.rpartition(".")[0])
        part = tensor.name.rpartition(".")[2]
        key = part, tensor.shape, heads
        if key not in known:
            known[key] = _ruled(tensor, heads, part)
        out[tensor.name] = known[key]
    return out


def _ruled(tensor: Logical, heads: Heads | None, part: str) -> tuple[Rule, tuple[Dim, ...]]:
    if prod(tensor.shape) == 1:
        of_tensor = tuple(map(replicated, tensor.shape))
        return Rule(tensor.name, of_tensor, "buffer", True, "", ""), of_tensor
    long = [number for number, length in enumerate(tensor.shape) if length != 1]
    count = 0 if heads is None else heads.query_heads if part in _OF_QUERIES else heads.kv_heads
    if heads is None or len(long) != 1 or tensor.shape[long[0]] != count:
        raise UnsupportedError(
            f"{short(tensor.name)} has the shape {list(tensor.shape)}: scales of the KV cache are cut where they are "
            f"one value for all heads or one for every head ({count or 'unknown'} here); remove them to have the "
            "engine work them out"
        )
    cut = heads.query(1) if part in _OF_QUERIES else heads.kv(1)
    of_tensor = tuple(cut if number == long[0] else replicated(1) for number in range(len(tensor.shape)))
    return Rule(tensor.name, of_tensor, "attn_head", True, "", ""), of_tensor


def _attentions(dims: Mapping[str, Sequence[Dim]]) -> dict[str, Heads]:
    """The heads along which the tensors of a module's modules are cut."""
    found: dict[str, Heads] = {}
    for name, of_tensor in dims.items():
        for dim in of_tensor:
            for axis in dim.axes:
                if isinstance(axis, Heads):
                    found.setdefault(name.rsplit(".", 2)[0], axis)
    return found
