"""Which ranks there are: tensor-parallel ranks, pipeline stages, and groups of experts.

Stages hold consecutive layers. Where experts are dealt *inside* the tensor-parallel group (vLLM, DeepSeek), its ranks
are the expert ranks and no expert is cut; elsewhere (Megatron) there are ``ep_size`` times as many ranks, each of which
cuts its experts like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from tpshard.errors import UnsupportedError, UsageError
from tpshard.intervals import Bounds, dealt

StageRule = Callable[[int, int], tuple[Bounds, ...]]
"""``rule(layers, pp_size)``: the layers ``[start, stop)`` of every stage."""


class Rank(NamedTuple):
    """Where a rank stands: all counted from 0."""

    tp: int
    pp: int
    ep: int

    def __str__(self) -> str:
        stage = f" of stage {self.pp}" if self.pp else ""
        return f"TP rank {self.tp}{stage}{f' of expert group {self.ep}' if self.ep else ''}"


@dataclass(frozen=True)
class Grid:
    """Degrees, and the layers of every stage.

    Args:
        tp_size: tensor-parallel ranks of a stage.
        stages: the layers ``[start, stop)`` of every pipeline stage.
        ep_size: groups among which experts are dealt; 1: every rank has a part of all experts.
        ep_inside: whether the tensor-parallel ranks are the expert ranks.

    Raises:
        UsageError: ``ep_size`` is neither 1 nor ``tp_size`` where experts are dealt inside.
    """

    tp_size: int
    stages: tuple[Bounds, ...]
    ep_size: int = 1
    ep_inside: bool = False

    def __post_init__(self) -> None:
        if self.ep_inside and self.ep_size not in (1, self.tp_size):
            raise UsageError(
                f"--ep {self.ep_size}: the tensor-parallel ranks hold the experts here, so it is 1 (every expert cut "
                f"over the {self.tp_size} ranks) or {self.tp_size} (whole experts dealt to them)"
            )

    def __str__(self) -> str:
        degrees = [f"TP {self.tp_size}"]
        degrees += [f"PP {self.pp_size}"] if self.pp_size > 1 else []
        degrees += [f"EP {self.ep_size}"] if self.ep_size > 1 else []
        return " x ".join(degrees)

    @property
    def pp_size(self) -> int:
        return len(self.stages)

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks: stage after stage, in it expert group after expert group, in it the tensor-parallel ranks."""
        groups = 1 if self.ep_inside else self.ep_size
        return tuple(
            Rank(tp, pp, tp if self.ep_inside and self.ep_size > 1 else ep)
            for pp in range(self.pp_size) for ep in range(groups) for tp in range(self.tp_size)
        )  # fmt: skip

    @property
    def cuts_experts(self) -> bool:
        """Whether the tensor-parallel ranks cut every expert, and do not take whole ones."""
        return not self.ep_inside or self.ep_size == 1

    def stage_of(self, layer: int) -> int:
        """The stage of a layer; layers past the last are with the last."""
        return next((pp for pp, (_, stop) in enumerate(self.stages) if layer < stop), self.pp_size - 1)

    def experts(self, count: int) -> tuple[Bounds, ...]:
        """The experts ``[start, stop)`` of every rank: dealt in order, the first groups taking one more."""
        bounds = dealt(count, self.ep_size)
        return tuple(bounds[rank.ep] for rank in self.ranks)


def given_stages(text: str, layers: int) -> tuple[Bounds, ...]:
    """Stages of as many layers each as a list says: ``16,15,15,15``.

    Raises:
        UsageError: it is no list of whole numbers, or they do not add up to the layers of the model.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--stages {text!r:.80} is no list of layers a stage; write it as 16,15,15,15") from None
    if min(counts) < 1 or sum(counts) != layers:
        raise UsageError(
            f"--stages {text} gives {sum(counts)} layers to {len(counts)} stages; the model has {layers}, and every "
            "stage takes at least one"
        )
    return _stages(counts)


def left_over_first(layers: int, pp_size: int) -> tuple[Bounds, ...]:
    """Layers that do not divide go one each to the first stages (``torch.tensor_split``)."""
    return dealt(layers, pp_size)


def left_over_last(layers: int, pp_size: int) -> tuple[Bounds, ...]:
    """Layers that do not divide go one each to the last stages."""
    base, extra = divmod(layers, pp_size)
    return _stages([base + (pp >= pp_size - extra) for pp in range(pp_size)])


def equal_stages(layers: int, pp_size: int) -> tuple[Bounds, ...]:
    """Every stage has as many layers.

    Raises:
        UnsupportedError: they do not divide.
    """
    if layers % pp_size:
        fit = [pp for pp in range(1, layers + 1) if layers % pp == 0]
        raise UnsupportedError(
            f"{layers} layers cannot be {pp_size} equal stages; choose --pp {', '.join(map(str, fit))}, or say with "
            "--stages how many layers each takes"
        )
    return dealt(layers, pp_size)


def _stages(counts: Sequence[int]) -> tuple[Bounds, ...]:
    return tuple(pairwise([sum(counts[:n]) for n in range(len(counts) + 1)]))
