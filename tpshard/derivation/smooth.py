"""Stand-ins for operators that hide what feeds what; they mix the same numbers, and hide none.

A rectifier that is off for every token of a short run passes nothing on. A softmax rounds keys that score low out of
the attention, and takes no notice of what is added to all scores: a bias of the keys feeds its heads by rounding
alone, and then not all of them. Here each has a like that is smooth and notices everything.
"""

from __future__ import annotations

import math
from typing import Any

import torch

F = torch.nn.functional
_RECTIFIERS = frozenset(
    (F.relu, F.relu_, F.relu6, F.hardtanh, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_)
)
_SOFTMAXES = frozenset((F.softmax, torch.softmax, torch.Tensor.softmax))
_MASKED = -1e4  # and below: no score but a mask


def smooth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives, or its stand-in."""
    if func in _RECTIFIERS:
        return F.softplus(args[0] if args else kwargs["input"])
    if func in _SOFTMAXES and args:
        return _softmax(*args, **kwargs)
    if func is F.scaled_dot_product_attention:
        return _attention(*args, **kwargs)
    return func(*args, **kwargs)


def _softmax(
    scores: torch.Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    shares = _shares(scores.double(), -1 if dim is None else dim)
    return shares.to(dtype or scores.dtype)


def _shares(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Shares that sum up to 1, in the order of the scores and none of them tiny; 0 where a score is masked."""
    masked = scores <= _MASKED
    scores = scores.masked_fill(masked, 0.0)  # before all else: the gradient of a quotient of infinities is no number
    narrow = torch.sigmoid(scores / (1 + scores.abs() / 4)).masked_fill(masked, 0.0)
    return narrow / narrow.sum(dim, keepdim=True).clamp_min(1e-12)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``F.scaled_dot_product_attention`` as its documentation writes it, with the stand-in for its softmax."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return _shares(scores, -1).to(value.dtype) @ value
