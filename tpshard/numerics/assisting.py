"""What a model that proposes tokens takes from the larger one that it assists: its last vector, its keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class _Rows(Protocol):
    @property
    def rows(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def values(self, name: str, *shape: int) -> torch.Tensor: ...


def from_assisted(config: Any, wanted: Mapping[str, Any], rows: _Rows) -> dict[str, Any]:
    """The arguments of a model whose layers all use another's keys; none for any other.

    It is run for one token behind ``rows.tokens`` others, as it is used: two vectors of the larger model's width
    (the last token's embedding and the last state), and for every type of layer keys and values ``[rows, kv heads,
    tokens, head size]``.
    """
    width = getattr(config, "backbone_hidden_size", None)
    if not {"inputs_embeds", "shared_kv_states"} <= wanted.keys() or not isinstance(width, int):
        return {}
    text = config.get_text_config()
    states = {}
    for number, kind in enumerate(text.layer_types):
        if kind not in states:
            layer = text.per_layer_config[number]
            shape = layer.num_key_value_heads, rows.tokens, layer.head_dim
            states[kind] = rows.values(f"keys of {kind}", *shape), rows.values(f"values of {kind}", *shape)
    return {
        "inputs_embeds": rows.values("vectors of the assisted model", 1, 2 * width),
        "shared_kv_states": states,
        "position_ids": torch.full((rows.rows, 1), rows.tokens - 1),
    }
