"""What the model is run on: token ids, an explicit mask, and positions that reach far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tpshard.errors import UnsupportedError, UsageError
from tpshard.listing import shown

from .arguments import arguments_of, in_dtype, pictures, takes
from .batch import Batch
from .skeleton import Skeleton

LONGEST_TEXT = 256  # tokens of a text that are run


def expert_counts(config: Any) -> tuple[int, int]:
    """Experts of a layer, and experts that one token goes to; (0, 1) where there are none."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = max(int(getattr(config, key, 0) or 0) for key in keys)
    return experts, int(getattr(config, "num_experts_per_tok", 0) or getattr(config, "moe_topk", 0) or 1)


def inputs_of(
    skeleton: Skeleton, batch: Batch, config: Any, device: torch.device, *, near: bool, pictured: bool = True
) -> Mapping[str, Any]:
    """Arguments of the model's forward, as its signature names them.

    The mask is explicit because gapped positions alone make transformers take the row for several packed
    sequences. Positions start at 0 and, unless ``near``, their second half is spread up to the last that the
    config allows, past the knee of a rope scaling. ``pictured``: whether a model that reads images among text is
    given some.

    Raises:
        UnsupportedError: the forward takes something that is not known here.
    """
    inputs = arguments_of(skeleton, batch, pictured=pictured)
    batch.units |= {value.shape[0] // batch.rows for value in inputs.values() if torch.is_tensor(value)}
    if "image_grid_thw" in inputs:
        batch.units.add(pictures(skeleton))  # patches that were merged
    longest = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 0) or 0)
    near = near or bool(getattr(config, "index_block_size", 0))  # a position is then looked up among the keys' blocks
    near = near or bool(getattr(config, "local_attn_chunk_length", 0))  # padded to chunks unless positions are given
    if "position_ids" in takes(skeleton.model) and "input_ids" in inputs and longest >= batch.tokens and not near:
        first = batch.tokens // 2
        far = torch.linspace(first, longest - 1, batch.tokens - first, dtype=torch.float64).round().long()
        inputs["position_ids"] = torch.cat([torch.arange(first), far]).expand(batch.rows, -1).contiguous()
    compute = next(p.dtype for p in skeleton.parameters.values() if p.is_floating_point())
    return {key: on_device(in_dtype(value, compute), device) for key, value in inputs.items()}


def on_device(value: Any, device: torch.device) -> Any:
    """An argument with its tensors on the device."""
    if isinstance(value, tuple):
        return tuple(on_device(part, device) for part in value)
    if isinstance(value, dict):
        return {key: on_device(part, device) for key, part in value.items()}
    return value.to(device) if torch.is_tensor(value) else value


def text_ids(root: Path, text: Path) -> torch.Tensor:
    """The first tokens of a text by the checkpoint's own tokenizer, at most :data:`LONGEST_TEXT`.

    Raises:
        UsageError: the text cannot be read or has fewer than two tokens.
        UnsupportedError: there is no tokenizer that works beside the weights.
    """
    import transformers

    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the text {shown(text)} cannot be read: {error}") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(root), local_files_only=True, trust_remote_code=False
        )
        ids = tokenizer(words)["input_ids"]
    except Exception as error:  # whatever a tokenizer's files make of it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedError(
            f"{shown(root)} has no tokenizer that works here, so no text can be given: {reason:.300}"
        ) from None
    if len(ids) < 2:
        raise UsageError(f"the text {shown(text)} has {len(ids)} tokens; give one of at least 2")
    return torch.tensor(ids[:LONGEST_TEXT])
