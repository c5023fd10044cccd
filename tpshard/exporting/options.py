"""What a user asks of an engine's layout, and the grid that it comes to."""

from __future__ import annotations

from types import ModuleType

from tpshard.errors import UnsupportedError, UsageError

from .enginetable import EngineTable, Version
from .grid import Grid, given_stages
from .parts import Model
from .registry import engine_named, engines

_MOST = 4096


def engine_and_version(text: str) -> tuple[ModuleType, str]:
    """The table and the version that ``vllm`` or ``vllm@0.32`` names; without a version the first of the table.

    Raises:
        UsageError: there is no such engine.
        UnsupportedError: the table does not know that version's names.
    """
    name, at, version = text.partition("@")
    module = engine_named(name)
    known: tuple[Version, ...] = module.VERSIONS
    if not at:
        return module, known[0].name
    if version not in [one.name for one in known]:
        raise UnsupportedError(
            f"the names of {name} {version!r:.40} are not known; those of "
            f"{', '.join(f'{name}@{one.name}' for one in known)} are"
        )
    return module, version


def grid_of(
    model: Model, table: EngineTable, engine: str, tp_size: int, pp_size: int = 1, ep_size: int = 1,
    stages: str | None = None,
) -> Grid:  # fmt: skip
    """The ranks of an engine's layout of a model.

    Raises:
        UsageError: degrees below 1 or contradicting each other.
        UnsupportedError: more stages than layers or more groups than experts, or a degree that the layout lacks.
    """
    for option, value in (("--tp", tp_size), ("--pp", pp_size), ("--ep", ep_size)):
        if not 1 <= value <= _MOST:
            raise UsageError(f"{option} {value} makes no sense; it is a whole number from 1 to {_MOST:,}")
    if stages is not None:
        bounds = given_stages(stages, model.layers)
        if pp_size not in (1, len(bounds)):
            raise UsageError(f"--stages names {len(bounds)} stages and --pp {pp_size}; leave --pp out")
        pp_size = len(bounds)
    for option, value, most in (("pp", pp_size, table.most[0]), ("ep", ep_size, table.most[1])):
        if most is not None and value > most:
            raise UnsupportedError(f"{engine} has no --{option} {value} in this layout; the largest is {most}")
    if pp_size > max(model.layers, 1):
        raise UnsupportedError(f"{model.layers} layers cannot be {pp_size} stages; choose --pp 1 to {model.layers}")
    if ep_size > 1 and ep_size > model.experts:
        held = f"{model.experts} experts" if model.experts else "no experts"
        raise UnsupportedError(f"--ep {ep_size}: this model has {held}; choose --ep 1 to {max(model.experts, 1)}")
    if table.whole_experts and model.experts and ep_size == 1:
        ep_size = tp_size
        if model.experts % tp_size and not table.uneven:
            fit = [degree for degree in range(1, model.experts + 1) if model.experts % degree == 0]
            raise UnsupportedError(
                f"{engine} deals whole experts to its ranks, and {model.experts} of them are not {tp_size} equal "
                f"shares; choose --tp {', '.join(map(str, fit))}"
            )
    if stages is None:
        bounds = table.stages(model.layers, pp_size)
    return Grid(tp_size, bounds, ep_size, table.ep_inside)


__all__ = ["engine_and_version", "engines", "grid_of"]
