"""The original as rank 0 runs it, and how much its numbers mean: its own noise, from the same sums in another order.

The noise is measured on the original alone, never on the shards: the inputs of every matrix that ends a block
are cut into as many parts as there are ranks, and the parts' products are added up, each rounded to the dtype
of the computation, as a group of ranks would do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpshard.intervals import dealt
from tpshard.manifest import Manifest

from .metrics import logit_metrics
from .points import Point, points_of
from .results import results_of
from .skeleton import Skeleton

SEVERAL = 4.0  # times the noise that one other order shows is what any order may show


@dataclass
class Expected:
    """What the original gives: outputs ``[batch, tokens, ...]``, and what it generates, all on the CPU.

    ``step_logits [steps, vocabulary]`` are those that each new token was chosen from. ``noise``: relative L2
    of the outputs in another order of sums; ``noise_kl`` and ``noise_abs`` likewise (of the logits).
    """

    outputs: torch.Tensor
    are_logits: bool
    new_ids: torch.Tensor | None
    step_logits: torch.Tensor | None
    noise: float
    noise_rows: torch.Tensor
    noise_kl: float
    noise_abs: float


def outputs_of(skeleton: Skeleton, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, bool]:
    """Logits, or the last hidden states where the model has none, and whether they are logits."""
    with torch.no_grad():
        outputs = skeleton.model(**inputs)
    found = results_of(outputs)
    return found.main, found.are_logits


def generated(
    skeleton: Skeleton, prompt: torch.Tensor | None, new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Greedy tokens with the model's own cache, ``[new_tokens]``, and each step's logits; None without a decoder."""
    from transformers import GenerationConfig

    model = skeleton.model
    if prompt is None or not model.can_generate():
        return None
    config = GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, num_beams=1, use_cache=True,
        eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    if model.config.is_encoder_decoder:
        config.decoder_start_token_id = getattr(model.config, "decoder_start_token_id", None) or 0
    with torch.no_grad():
        out = model.generate(prompt, generation_config=config, attention_mask=torch.ones_like(prompt))
    return out.sequences[0, -new_tokens:].cpu(), torch.stack([row[0] for row in out.logits]).cpu()


def run_original(
    skeleton: Skeleton, manifest: Manifest, inputs: Mapping[str, Any], prompt: torch.Tensor | None, new_tokens: int
) -> Expected:
    """Run the original and measure its noise; the skeleton has its parameters."""
    outputs, are_logits = outputs_of(skeleton, inputs)
    made = generated(skeleton, prompt, new_tokens) if new_tokens else None
    handles = reordered(skeleton, points_of(skeleton, manifest), manifest.tp_size)
    try:
        again, _ = outputs_of(skeleton, inputs)
    finally:
        for undo in handles:
            undo()
    outputs, again = outputs.cpu(), again.cpu()
    metrics = logit_metrics(again, outputs)
    return Expected(
        outputs, are_logits, made[0] if made else None, made[1] if made else None,
        metrics["rel_l2"], row_errors(again, outputs), metrics["kl"], metrics["max_abs"],
    )  # fmt: skip


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative L2 error of every position, ``[positions]``."""
    found, expected = found.double().flatten(0, -2), expected.double().flatten(0, -2)
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)


def reordered(skeleton: Skeleton, points: Mapping[str, Point], parts: int) -> list[Any]:
    """Make every module at a sum compute it in ``parts`` parts; returns functions that undo it."""
    undo: list[Any] = []
    generator = torch.Generator().manual_seed(0)
    for path, point in points.items():
        module = skeleton.modules[path]
        if point.kind != "sum" or isinstance(module, nn.Embedding):
            continue
        if type(module).forward is nn.Linear.forward:
            undo.append(module.register_forward_hook(lambda m, a, out: _in_parts(m, a[0], parts)).remove)
        else:
            undo.append(module.register_forward_hook(lambda m, a, out: _rounded(out, parts, generator)).remove)
    return undo


def _in_parts(module: Any, x: torch.Tensor, parts: int) -> torch.Tensor:
    total: torch.Tensor | None = None
    for start, stop in dealt(x.shape[-1], max(2, min(parts, x.shape[-1]))):
        part = torch.nn.functional.linear(x[..., start:stop], module.weight[:, start:stop])
        total = part if total is None else total + part
    assert total is not None
    return total if module.bias is None else total + module.bias


def _rounded(output: Any, parts: int, generator: torch.Generator) -> Any:
    """A sum whose order cannot be changed from outside: rounded as often as the parts would be."""
    first = output[0] if isinstance(output, tuple) else output
    chance = torch.rand(first.shape, generator=generator, dtype=torch.float32) * 2 - 1
    moved = first * (1 + chance.to(first.device) * (torch.finfo(first.dtype).eps / 2 * parts**0.5)).to(first.dtype)
    return (moved, *output[1:]) if isinstance(output, tuple) else moved
