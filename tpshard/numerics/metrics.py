"""What people ask of two sets of logits."""

from __future__ import annotations

import torch


def logit_metrics(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Figures over all positions of ``[..., vocabulary]``.

    ``max_abs`` and ``rel_l2`` of the logits; ``kl``: mean over positions of KL(expected || found) in nats;
    ``top1``, ``top5``: the part of positions at which the likeliest token, or the five likeliest as a set, agree.
    """
    found, expected = found.double().flatten(0, -2), expected.double().flatten(0, -2)
    gap = found - expected
    size = float(torch.linalg.vector_norm(expected))
    log_p, log_q = torch.log_softmax(expected, -1), torch.log_softmax(found, -1)
    five = min(5, expected.shape[-1])
    top_found, top_expected = found.topk(five).indices, expected.topk(five).indices
    return {
        "max_abs": float(gap.abs().max()),
        "rel_l2": float(torch.linalg.vector_norm(gap)) / size if size else float("inf"),
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean().clamp_min(0)),
        "top1": float((top_found[:, 0] == top_expected[:, 0]).double().mean()),
        "top5": float((top_found.sort(-1).values == top_expected.sort(-1).values).all(-1).double().mean()),
    }


def perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """``exp`` of the mean negative log-likelihood of ``ids [batch, tokens]``, each token given those before it."""
    log_p = torch.log_softmax(logits[:, :-1].double(), -1)
    picked = log_p.gather(-1, ids[:, 1:, None].to(log_p.device))
    return float((-picked.mean()).exp())
