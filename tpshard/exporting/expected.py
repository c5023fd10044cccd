"""Which tensors a checkpoint would hold that an engine's files were made of: by the family's table and the names found.

An engine's directory has lost the checkpoint's names. The family's table and config.json say which there may be and in
which shapes; which of those that are optional there are, and which of several spellings, the engine's names tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from tpshard.axes import Dim, replicated
from tpshard.errors import UnsupportedError
from tpshard.matching import Logical, Matched
from tpshard.source import natural_key
from tpshard.table import Rule, Table, placed, placeholders, template_of

from .arrange import entry_of, rendered, shown_as, singles, template_of_entry, words_of
from .enginetable import EngineTable
from .parts import Model, Part, parts_of


class Candidate(NamedTuple):
    """A tensor that the checkpoint may hold, with its rule and dimensions; its dtype is not known yet."""

    tensor: Logical
    rule: Rule
    dims: tuple[Dim, ...]


def candidates(table: Table, family: str) -> list[Candidate]:
    """All tensors that a table knows of, under its most usual prefixes; buffers and other optional unknowns left out.

    Raises:
        UnsupportedError: a mandatory tensor has a length or number that neither table nor config tell.
    """
    found = []
    for rule in table.rules:
        if rule.role == "buffer":
            continue
        stack = table.stacks[rule.stack]
        ranges = []
        for place in placeholders(rule.name):
            every: range | list[int] | None
            if place == "{layer}":
                every = sorted(rule.layers) if rule.layers is not None else range(stack.layers + stack.extra_layers)
            elif place == "{expert}":
                every = range(stack.experts)
            elif place.isdigit():
                every = [int(place)]
            else:
                every = None
            ranges.append(every)
        if any(every is None for every in ranges) or any(dim is None for dim in rule.dims):
            if rule.optional or rule.block:
                continue
            raise UnsupportedError(
                f"{rule.name} of the family {family} has a size that config.json does not tell, so it cannot be read "
                "back from an engine's files"
            )
        dims = tuple(replicated(dim) if isinstance(dim, int) else dim for dim in rule.dims if dim is not None)
        shape = tuple(dim.extent for dim in dims)
        name = placed(rule.name, stack.pairs[0])
        for numbers in product(*[every for every in ranges if every is not None]):
            found.append(Candidate(Logical(_numbered(name, numbers), "", shape), rule, dims))
    return found


def _numbered(name: str, numbers: tuple[int, ...]) -> str:
    places = iter(numbers)
    return ".".join(
        str(next(places)) if part.isdigit() or (part.startswith("{") and part.endswith("}")) else part
        for part in name.split(".")
    )


class Named(NamedTuple):
    """A candidate's part and the name under which the engine would store it, with the checkpoint's layer number."""

    candidate: Candidate
    part: Part
    name: str


def named(model: Model, table: EngineTable, engine: str, found: list[Candidate]) -> Iterator[Named]:
    """Every part of every candidate under the engine's name, layers numbered as in the checkpoint."""
    words = words_of((part for one in found for part in parts_of(one.tensor, model.matched)), model)
    for candidate in found:
        for part in parts_of(candidate.tensor, model.matched):
            if table.drop(part) or (model.tied and part.word == "head"):
                continue
            for shown in shown_as(part, model, table):
                try:
                    entry = entry_of(shown, words, table, engine)
                except UnsupportedError:  # the engine has no place for it, so its files are not of a model that has it
                    continue
                for single in singles(shown, entry):
                    name = rendered(template_of_entry(single, entry), single, table, part.layer)
                    yield Named(candidate, single, name)


def held(
    model: Model, table: EngineTable, engine: str, found: list[Candidate], names: Mapping[str, str]
) -> list[Logical]:
    """The tensors of the checkpoint by the engine's ``names`` (with their dtypes), in natural order of their names.

    ``names`` are those of all ranks, layers numbered as in the checkpoint. Of two spellings of one tensor the table's
    first is taken.
    """
    claimed: dict[tuple[str, str, int | None, int | None], str] = {}
    dtypes: dict[str, str] = {}
    lacking: set[str] = set()
    for candidate, part, name in named(model, table, engine, found):
        own = candidate.tensor.name
        if name not in names:
            if not (model.tied and part.word in ("embed", "head")):  # of a tied embedding's names one will do
                lacking.add(own)
            continue
        for expert in range(part.dims[0].extent) if part.bank and part.expert is None else (part.expert,):
            if claimed.setdefault((name, part.word, part.layer, expert), own) != own:
                lacking.add(own)
        dtypes[own] = names[name]
    there = dtypes.keys() - lacking
    broken = {_block_of(c) for c in found if not c.rule.optional and c.tensor.name not in there}
    kept = [
        c.tensor._replace(dtype=dtypes[c.tensor.name]) for c in found
        if c.tensor.name in there and (not c.rule.block or _block_of(c) not in broken)
    ]  # fmt: skip
    return sorted(kept, key=lambda tensor: natural_key(tensor.name))


def _block_of(candidate: Candidate) -> tuple[int, str, int | None]:
    """The block of a layer of which it is: a layer holds all that is mandatory in one, or none of it."""
    rule = candidate.rule
    numbers = dict(zip(placeholders(rule.name), template_of(candidate.tensor.name)[1], strict=False))
    return rule.stack, rule.block, numbers.get("{layer}")


def provisional(table: Table, found: list[Candidate]) -> Matched:
    """The candidates as if all of them were there."""
    prefix = [stack.pairs[0] for stack in table.stacks]
    tied = {placed(tie.alias, prefix[tie.stack]): placed(tie.target, prefix[tie.stack]) for tie in table.tied}
    for share in table.shares:
        first, *others = [placed(name, prefix[share.stack]) for name in share.names]
        tied |= dict.fromkeys(others, first)
    return Matched({c.tensor.name: c.rule for c in found}, {c.tensor.name: c.dims for c in found}, tied, ())
