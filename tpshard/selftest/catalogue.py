"""What a planted fault is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .scratch import Scratch, layer_of

RESEALED, UNSEALED, PLAN, EQUIVALENT = "resealed", "unsealed", "plan", "equivalent"
# Names of modules in transformers 5 where the files have others.
_SAME_IN_MEMORY = {"block_sparse_moe": "mlp", "embed_out": "lm_head"}


@dataclass(frozen=True)
class Expected:
    """Where a fault must show.

    Args:
        points: patterns of module paths; every failing point must match one, and one must fail. Empty
            where no run is asked for.
        rank: the rank that must be named, where one rank alone can be.
        levels: levels that must each see it.
        refused: the verifier may also refuse to run at all, with a clear error.
        config: the fault is in the config: a finding that names the file is at its place.
    """

    points: tuple[str, ...] = ()
    rank: int | None = None
    levels: tuple[str, ...] = ("forward",)
    refused: bool = False
    config: bool = False


Act = Callable[[Scratch], Expected]


@dataclass(frozen=True)
class Mutant:
    """A fault: ``act`` plants it in a scratch copy, or raises ``NotHereError``.

    Args:
        kind: ``resealed``: the manifest's digests are made to fit; ``unsealed``: they are not;
            ``equivalent``: the model stays the same, and no alarm may be raised.
        families: those that it applies to; empty: all that have the tensors.
        degrees: likewise.
    """

    name: str
    says: str
    act: Act
    kind: str = RESEALED
    families: tuple[str, ...] = ()
    degrees: tuple[int, ...] = ()


MUTANTS: dict[str, Mutant] = {}


def catalogue() -> dict[str, Mutant]:
    """All faults by name, in the order of the modules that plant them."""
    from . import attention, configs, feedforward, norms, statespace, vocabulary  # noqa: F401

    return MUTANTS


def mutant(
    name: str, *, kind: str = RESEALED, families: tuple[str, ...] = (), degrees: tuple[int, ...] = ()
) -> Callable[[Act], Act]:
    """Register a fault; its description is the function's docstring."""

    def register(act: Act) -> Act:
        if name in MUTANTS:
            raise ValueError(f"two faults are named {name}")
        MUTANTS[name] = Mutant(name, (act.__doc__ or "").strip().rstrip("."), act, kind, families, degrees)
        return act

    return register


def block(*names: str, rank: int | None = None) -> Expected:
    """The fault shows in the blocks that hold these tensors, and nowhere else."""
    return Expected(tuple(dict.fromkeys(pattern for name in names for pattern in _patterns(name))), rank)


def _patterns(name: str) -> tuple[str, ...]:
    layer = layer_of(name)
    rest = name[len(layer) + 1 :] if layer else name
    if not layer:
        return (f"{name.rpartition('.')[0]}",)
    first, _, more = rest.partition(".")
    if first == "fc1":  # no module around the feed-forward: it shows where its second matrix ends
        return (f"{layer}.fc2",)
    if more in ("weight", "bias"):  # a norm or matrix of the layer itself
        return (f"{layer}.{first}",)
    return (f"{layer}.{_SAME_IN_MEMORY.get(first, first)}.*", f"{layer}.{_SAME_IN_MEMORY.get(first, first)}")


def module(name: str, rank: int | None = None) -> Expected:
    """The fault shows at the module that holds this very tensor."""
    path = name.rpartition(".")[0]
    in_memory = ".".join(_SAME_IN_MEMORY.get(part, part) for part in path.split("."))
    return Expected(tuple(dict.fromkeys((path, in_memory))), rank)
