"""Proves a table on the model's own code: no rank may need what the table says it does not hold.

For every rank the model runs with all that the rank lacks made useless: columns of row-parallel matrices
and vocabulary rows zero, everything else noise. Each row-parallel module's outputs must then add up over
the ranks to the original's, and each rank's slice of the logits must be the original's. A module's
true output is put in place of its partial one, so that one run checks every block on true inputs.
Where a table says that a norm needs a sum over ranks, the norm gets the original's statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpshard.matching import Logical, Matched, match
from tpshard.partition import partition
from tpshard.roles import ROW as ROW_PARALLEL
from tpshard.table import ADDED_ONCE, NEEDS_SUM, Table

TOKENS = torch.tensor([[1, 5, 9, 2, 7, 11]])
TOLERANCE = 1e-4  # norms and state-space scans run in float32 inside some models
Tensors = Mapping[str, torch.Tensor]


def matched(table: Table, tensors: Tensors) -> Matched:
    return match(table, [Logical(name, "F64", tuple(value.shape)) for name, value in tensors.items()])


def held(found: Matched, name: str, shape: torch.Size, tp_size: int, rank: int) -> torch.Tensor:
    """A mask of what the rank holds of a tensor."""
    mask = torch.ones(shape, dtype=torch.bool)
    for axis, dim in enumerate(found.dims_of(name)):
        keep = torch.zeros(shape[axis], dtype=torch.bool)
        for start, length in partition(dim, tp_size).ranks[rank]:
            keep[start : start + length] = start >= 0
        mask &= keep.view(-1, *[1] * (len(shape) - axis - 1))
    return mask


def of_rank(found: Matched, tensors: Tensors, tp_size: int, rank: int) -> dict[str, torch.Tensor]:
    """The checkpoint as the rank knows it, at full size."""
    noise = torch.Generator().manual_seed(100 * tp_size + rank)
    out = {}
    for name, value in tensors.items():
        rule = found.rule_of(name)
        if rule.note == ADDED_ONCE and rank:
            out[name] = torch.zeros_like(value)
            continue
        fill = torch.zeros_like(value)
        if rule.role not in ROW_PARALLEL:
            fill = torch.randn(value.shape, generator=noise, dtype=torch.float64).to(value.dtype)
        out[name] = torch.where(held(found, name, value.shape, tp_size, rank), value, fill)
    return out


class _Run:
    """One forward of a model with its row-parallel outputs and norm statistics recorded or put in place."""

    def __init__(self, model: Any, table: Table, original: _Run | None = None) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self.statistics: dict[str, torch.Tensor] = {}
        self.original = original
        head = next(rule.name for rule in table.rules if rule.role == "head")
        # In memory every family calls its head lm_head; expert banks are stacked, which tables know.
        state = {head if name == "lm_head.weight" else name: value for name, value in model.state_dict().items()}
        inside = matched(table, state)
        for name, rule in inside.rules.items():
            module = name.rpartition(".")[0]
            if rule.role in ROW_PARALLEL:
                model.get_submodule(module).register_forward_hook(self._record(module))
            elif rule.note == NEEDS_SUM:
                norm = model.get_submodule(module)
                norm.forward = self._normalise(module, norm, norm.forward)
        with torch.no_grad():
            self.logits = model(input_ids=TOKENS).logits

    def _record(self, name: str) -> Any:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            self.outputs[name] = output.clone()  # some models add into it in place
            return None if self.original is None else self.original.outputs[name].clone()

        return hook

    def _normalise(self, name: str, norm: Any, forward: Any) -> Any:
        def replaced(x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            raw = x if gate is None else x * torch.nn.functional.silu(gate)
            if self.original is None:
                out = forward(x) if gate is None else forward(x, gate)
                self.statistics[name] = out / (raw * norm.weight)
                return out
            return raw * self.original.statistics[name] * norm.weight

        return replaced


def differences(config: Any, architecture: Any, table: Table, tensors: Tensors, tp_size: int) -> dict[str, float]:
    """For each row-parallel module, and the logits: the largest relative difference from the original."""

    def run(state: Tensors, original: _Run | None = None) -> _Run:
        model = architecture.from_pretrained(
            None, config=config, state_dict=dict(state), dtype=torch.float64, experts_implementation="eager"
        )
        return _Run(model.eval(), table, original)

    found = matched(table, tensors)
    head = next(r for r in table.rules if r.role == "head").dims[0]
    original = run(tensors)
    ranks = [run(of_rank(found, tensors, tp_size, rank), original) for rank in range(tp_size)]
    out = {}
    for name, expected in original.outputs.items():
        total = sum(rank.outputs[name] for rank in ranks)
        out[name] = float((total - expected).abs().max() / expected.abs().max())
    worst = 0.0
    for rank, own in enumerate(ranks):
        for start, length in partition(head, tp_size).ranks[rank]:
            if start >= 0:
                gap = (own.logits - original.logits)[..., start : start + length].abs().max()
                worst = max(worst, float(gap / original.logits.abs().max()))
    return out | {"logits": worst}
