"""The role of a tensor, read from its name and from what is summed: hints, which the level *plan* then judges."""

from __future__ import annotations

import re

_WORDS = (
    (r"(\w+_)?q(_proj|_lin)?|wq|query(_proj|_layer)?", "q"),
    (r"(\w+_)?k(_proj|_lin)?|wk|key(_proj|_layer)?", "k"),
    (r"(\w+_)?v(_proj|_lin)?|wv|value(_proj|_layer)?", "v"),
    (r".*gate_up.*", "gate_up"),
    (r".*gate.*|w1", "gate"),
)


def family_of(name: str) -> str:
    for word, family in (("shared", "shared"), ("expert", "expert"), ("heads", "heads"), ("ffn", "ffn")):
        if name.startswith(word):
            return family
    return "linear"


def role_of(pattern: str, family: str, summed: bool, rank: int) -> str:
    """The role of a cut tensor, by the part of a layer that it is of and the words of its name."""
    leaf = pattern.removesuffix(".weight").removesuffix(".bias")
    bias = "_bias" if pattern.endswith("bias") and rank == 1 else ""
    if summed:
        return {"heads": "o", "ffn": "down", "expert": "expert_down", "shared": "shared_down"}.get(family, "linear_out")
    is_value = rank == 1 or (pattern.endswith("bias") and family in ("heads", "linear"))  # XLNet's [heads, head size]
    if is_value and not bias:
        return {"heads": "attn_head", "ffn": "ffn_channel"}.get(family, "linear_head")
    word = next((role for expression, role in _WORDS if re.fullmatch(expression, leaf.rpartition(".")[2])), "")
    if family == "heads":
        return (word if word in ("q", "k", "v") else "qkv") + bias
    if family == "linear":
        return ("linear_conv" if rank == 3 else "linear_in") + bias
    word = word if word in ("gate", "gate_up") else "up"
    return {"expert": "expert_", "shared": "shared_"}.get(family, "") + word + bias


def once_role(pattern: str) -> str:
    if "shared_expert" in pattern:
        return "shared_down_bias"
    if "expert" in pattern:
        return "expert_down_bias"
    return "o_bias" if "att" in pattern else "down_bias"


def whole_role(pattern: str, rank: int) -> str:
    if re.search(r"norm|(^|[._])ln", pattern) and rank == 1:
        return "norm_bias" if pattern.endswith("bias") else "norm"
    if re.search(r"router|(^|[._])gate\.weight$|correction", pattern):
        return "router"
    if re.search(r"position|wpe|token_type", pattern):
        return "position"
    return "whole"


def noun_of(name: str) -> str:
    return {"heads": "query heads", "ffn": "feed-forward channels"}.get(name, f"{name.replace('_', ' ')} units")
