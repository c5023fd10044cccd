"""What the model is run on: token ids, an explicit mask, and positions that reach far."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tpshard.errors import UnsupportedError, UsageError
from tpshard.listing import shown

from .batch import Batch
from .skeleton import Skeleton

LONGEST_TEXT = 256  # tokens of a text that are run


def vocabulary_of(skeleton: Skeleton, config: Any) -> int:
    """How many token ids the model takes."""
    table = skeleton.model.get_input_embeddings()
    return int(table.weight.shape[0]) if table is not None else int(config.vocab_size)


def expert_counts(config: Any) -> tuple[int, int]:
    """Experts of a layer, and experts that one token goes to; (0, 1) where there are none."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = max(int(getattr(config, key, 0) or 0) for key in keys)
    return experts, int(getattr(config, "num_experts_per_tok", 0) or getattr(config, "moe_topk", 0) or 1)


def inputs_of(skeleton: Skeleton, batch: Batch, config: Any, device: torch.device, *, near: bool) -> Mapping[str, Any]:
    """Arguments of the model's forward.

    The mask is explicit because gapped positions alone make transformers take the row for several packed
    sequences. Positions start at 0 and, unless ``near``, their second half is spread up to the last that the
    config allows, past the knee of a rope scaling.
    """
    takes = inspect.signature(skeleton.model.forward).parameters
    ids = batch.ids()
    inputs: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in takes:
        inputs["attention_mask"] = torch.ones_like(ids)
    longest = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 0) or 0)
    if "position_ids" in takes and longest >= batch.tokens and not near:
        first = batch.tokens // 2
        far = torch.linspace(first, longest - 1, batch.tokens - first, dtype=torch.float64).round().long()
        inputs["position_ids"] = torch.cat([torch.arange(first), far]).expand(batch.rows, -1).contiguous()
    if "use_cache" in takes:
        inputs["use_cache"] = False
    return {key: value.to(device) if torch.is_tensor(value) else value for key, value in inputs.items()}


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
