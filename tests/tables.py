"""What a table says, asked by name: the rule of a tensor, the rows of a rank, all tensors that must be there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tpshard.axes import Dim
from tpshard.matching import Logical, known_names
from tpshard.partition import partition
from tpshard.registry import table_for
from tpshard.table import Rule, Table, placed

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def checkpoint(
    config: Config,
    prefix: int = 0,
    *,
    blocks: Sequence[str] = (),
    refused: Sequence[str] = (),
    optional_stacks: bool = True,
    without: str = "$^",
) -> Shapes:
    """Names and shapes of a checkpoint that has all that must be there, under one of the prefixes.

    ``blocks`` are those to take where the table leaves a choice (else the first), ``refused`` blocks to leave out
    unless they are among them; ``optional_stacks`` says whether stacks that may be absent are there; ``without`` is
    a pattern of names.
    """
    table = table_for(config)
    left_out = {b for choice in table.choices for b in choice.blocks if b not in blocks}
    left_out -= {choice.blocks[0] for choice in table.choices if not set(blocks) & set(choice.blocks)}
    left_out |= set(refused) - set(blocks)
    shapes: Shapes = {}
    for rule in table.rules:
        stack = table.stacks[rule.stack]
        if rule.optional or rule.block in left_out or (stack.optional and not optional_stacks):
            continue
        name = placed(rule.name, stack.pairs[min(prefix, len(stack.pairs) - 1)])
        shape = tuple(dim.extent if isinstance(dim, Dim) else dim if dim is not None else 3 for dim in rule.dims)
        layers = [n for n in range(stack.layers) if rule.layers is None or n in rule.layers]
        names = [name.replace("{layer}", str(n)) for n in layers] if "{layer}" in name else [name]
        every = range(stack.experts) if "{expert}" in name else [0]
        names = [one.replace("{expert}", str(e)) for one in names for e in every]
        shapes |= {one: shape for one in names if not re.search(without, one)}
    return shapes


def tensors(shapes: Mapping[str, tuple[int, ...]]) -> list[Logical]:
    """The tensors of these names and shapes."""
    return [Logical(name, "F32", shape) for name, shape in shapes.items()]


def rule_of(table: Table, name: str) -> Rule:
    """The rule that a name on disk falls under."""
    return known_names(table, [name])[name].rule


def rows(config: Config, name: str, axis: int, tp_size: int, rank: int) -> list[tuple[int, int]]:
    """The indices ``(start, stop)`` of a dimension that a rank holds, in stored order."""
    dim = rule_of(table_for(config), name).dims[axis]
    assert isinstance(dim, Dim)
    return [(run.start, run.start + run.length) for run in partition(dim, tp_size).ranks[rank]]
