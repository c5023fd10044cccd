"""Holds a checkpoint's tensors against a table: every tensor has one rule, every mandatory rule its tensors.

Truth comes from the files: a shape that contradicts the config is refused with both numbers, a tensor
that no rule knows and a tensor that should be there and is not are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from .axes import Dim, replicated
from .counting import counted
from .errors import DamagedError, UnsupportedError, short
from .table import Choice, Rule, Stack, Table, placed, placeholders, rule_template, template_of

SHOWN = 5  # names listed in a message before "and N more"


class Logical(NamedTuple):
    """A tensor of the model as the source stores it: name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Matched:
    """The rule and the dimensions of every tensor.

    Args:
        rules: rule by tensor name; a tensor copied whole on request has none.
        dims: one :class:`Dim` a dimension, by tensor name.
        tied: tensors that the config ties to another, with that one's name.
        unknown: tensors that no rule knows, copied whole on request.
    """

    rules: Mapping[str, Rule]
    dims: Mapping[str, tuple[Dim, ...]]
    tied: Mapping[str, str]
    unknown: tuple[str, ...]

    @property
    def aliases(self) -> dict[str, str]:
        """Tied tensors that the files do not store themselves."""
        return {alias: to for alias, to in self.tied.items() if alias not in self.dims and to in self.dims}

    def rule_of(self, name: str) -> Rule:
        return self.rules[name]

    def dims_of(self, name: str) -> tuple[Dim, ...]:
        return self.dims[name]


class _Entry(NamedTuple):
    rule: Rule
    name: str  # with the prefix in place of @
    places: tuple[str, ...]  # '{layer}', '{expert}', or a literal number
    stack: Stack

    def takes(self, numbers: tuple[int, ...]) -> bool:
        """Whether these numbers in its template are a tensor of the rule."""
        return all(self._takes(place, number) for place, number in zip(self.places, numbers, strict=True))

    def _takes(self, place: str, number: int) -> bool:
        stack, only = self.stack, self.rule.layers
        if place == "{layer}":  # a rule of single layers takes those beyond the last, too: they are refused by number
            return only is None or number in only or number >= stack.layers + stack.extra_layers
        if place == "{idle}":
            return stack.experts <= number < stack.experts + stack.idle_experts
        return place.startswith("{") or int(place) == number


def match(table: Table, tensors: Iterable[Logical], *, copy_unknown: bool = False) -> Matched:
    """Match all tensors of a checkpoint.

    Raises:
        UnsupportedError: a tensor that no rule knows (unless ``copy_unknown``).
        DamagedError: a tensor is missing, or a shape or number contradicts the config.
    """
    tensors = list(tensors)
    names = [(tensor, *template_of(tensor.name)) for tensor in tensors]
    prefixes = _best_prefixes(table, {template for _, template, _ in names})
    entries = _entries(table, prefixes)
    modules = [(placed(rule.name, prefixes[rule.stack]) + ".", rule) for rule in table.modules]
    rules: dict[str, Rule] = {}
    dims: dict[str, tuple[Dim, ...]] = {}
    unknown: list[str] = []
    present: dict[int, list[tuple[int, ...]]] = {}
    checked: dict[tuple[int, tuple[int, ...]], tuple[Dim, ...]] = {}
    order = {id(rule): at for at, rule in enumerate(table.rules)}
    wrong: list[tuple[int, DamagedError]] = []
    for tensor, template, numbers in names:
        entry = _entry(entries.get(template, ()), numbers)
        if entry is None:
            dims[tensor.name] = tuple(replicated(length) for length in tensor.shape)
            module = next((rule for place, rule in modules if tensor.name.startswith(place)), None)
            if module is None:
                unknown.append(tensor.name)
            else:
                rules[tensor.name] = module
            continue
        key = id(entry.rule), tensor.shape
        known = checked.get(key)
        if known is None:
            try:
                known = checked[key] = _checked_dims(entry.rule, tensor)
            except DamagedError as error:
                wrong.append((order[id(entry.rule)], error))
                continue
        rules[tensor.name], dims[tensor.name] = entry.rule, known
        present.setdefault(id(entry.rule), []).append(numbers)
    if wrong:
        raise min(wrong, key=lambda item: item[0])[1]  # the table's order: the tensor that explains the others first
    if unknown and not copy_unknown:
        raise UnsupportedError(
            f"{listed(unknown)}: no rule of the table knows "
            f"{'this tensor' if len(unknown) == 1 else 'these tensors'}, so how to cut is unknown; "
            "use --copy-unknown to keep such tensors whole on every rank"
        )
    for number, stack in enumerate(table.stacks):
        of_stack = [entry for entry in _flat(entries) if entry.rule.stack == number]
        if not stack.optional or any(id(entry.rule) in present for entry in of_stack):
            _require_complete(table, number, stack, of_stack, present)
    held = {rule.stack for rule in rules.values()}
    _require_one_spelling(table, held)
    _require_modules(table, modules, held, set(map(id, rules.values())))
    tied = {placed(tie.alias, prefixes[tie.stack]): placed(tie.target, prefixes[tie.stack]) for tie in table.tied}
    for share in table.shares:
        if share.stack in held or not table.stacks[share.stack].optional:
            tied |= _shared([placed(name, prefixes[share.stack]) for name in share.names], dims)
    return Matched(rules, dims, tied, tuple(unknown))


def _require_modules(
    table: Table, modules: Sequence[tuple[str, Rule]], stacks: set[int], present: set[int]
) -> None:
    """Of every module that is whole as it stands there is something."""
    for place, rule in modules:
        due = rule.stack in stacks or not table.stacks[rule.stack].optional
        if due and not rule.optional and id(rule) not in present:
            raise DamagedError(
                f"nothing of the module {place.removesuffix('.')} is among the weights; "
                "download or copy the checkpoint again"
            )


def _require_one_spelling(table: Table, held: set[int]) -> None:
    """Of the stacks that are spellings of one model exactly one is there."""
    for stacks in table.spellings:
        found = sorted(held.intersection(stacks))
        first = [next(rule.name for rule in table.rules if rule.stack == number) for number in found or stacks]
        if len(found) != 1:
            state = f"both {' and '.join(first)}, of which" if found else f"none of {', '.join(first)}, and"
            raise DamagedError(f"the weights hold {state} a model has one; save or download the checkpoint again")


def _shared(names: Sequence[str], held: Mapping[str, object]) -> dict[str, str]:
    """The names of one tensor that the model has too, with the first that is held; those of absent parts it has not."""
    first = next((name for name in names if name in held), None)
    if first is None:
        raise DamagedError(
            f"{names[0]} is missing from the weights, and so is every other name that the model has for it "
            f"({', '.join(names[1:])}); download or copy the checkpoint again"
        )
    around = {name: name.rsplit(".", 2)[0] + "." if name.count(".") > 1 else "" for name in names}
    there = {part for part in around.values() if any(name.startswith(part) for name in held)}
    return {name: first for name in names[1:] if name not in held and around[name] in there}


class Known(NamedTuple):
    """The rule that a name has in a table, and the numbers in it."""

    rule: Rule
    numbers: tuple[int, ...]


def known_names(table: Table, names: Iterable[str]) -> dict[str, Known]:
    """The rule of every name that the table knows; layers and experts beyond the config's it does not know.

    Nothing is asked of shapes, nor whether all the tensors of a model are among the names.
    """
    parts = {name: template_of(name) for name in names}
    entries = _entries(table, _best_prefixes(table, {template for template, _ in parts.values()}))
    found = {}
    for name, (template, numbers) in parts.items():
        entry = _entry(entries.get(template, ()), numbers)
        if entry is not None and _promised(table.stacks[entry.rule.stack], entry, numbers):
            found[name] = Known(entry.rule, numbers)
    return found


def _promised(stack: Stack, entry: _Entry, numbers: tuple[int, ...]) -> bool:
    """Whether the config has the layer and the expert of a name."""
    most = {"{layer}": stack.layers + stack.extra_layers, "{expert}": stack.experts}
    return all(n < most.get(place, n + 1) for place, n in zip(entry.places, numbers, strict=True))


def _best_prefixes(table: Table, templates: set[str]) -> list[tuple[str, str]]:
    """Of every stack the prefix under which most of its rules find a tensor."""

    def hits(number: int, prefix: tuple[str, str]) -> int:
        found = sum(rule_template(placed(r.name, prefix)) in templates for r in table.rules if r.stack == number)
        places = [rule_template(placed(r.name, prefix)) + "." for r in table.modules if r.stack == number]
        return found + sum(any(template.startswith(place) for template in templates) for place in places)

    return [max(stack.pairs, key=partial(hits, number)) for number, stack in enumerate(table.stacks)]


def _entries(table: Table, prefixes: Sequence[tuple[str, str]]) -> dict[str, list[_Entry]]:
    entries: dict[str, list[_Entry]] = {}
    for rule in table.rules:
        name, stack = placed(rule.name, prefixes[rule.stack]), table.stacks[rule.stack]
        entry = _Entry(rule, name, placeholders(name), stack)
        entries.setdefault(rule_template(name), []).append(entry)
    return entries


def _flat(entries: Mapping[str, Sequence[_Entry]]) -> list[_Entry]:
    """All entries; those of one template lie together, and else in the table's order."""
    return [entry for of_template in entries.values() for entry in of_template]


def _entry(candidates: Sequence[_Entry], numbers: tuple[int, ...]) -> _Entry | None:
    return next((entry for entry in candidates if entry.takes(numbers)), None)


def _checked_dims(rule: Rule, tensor: Logical) -> tuple[Dim, ...]:
    if rule.either_way:
        other = (*rule.dims[:-2], *reversed(rule.dims[-2:]))
        if tensor.shape == tuple(dim.extent if isinstance(dim, Dim) else dim for dim in other):
            mine = tuple(dim.extent if isinstance(dim, Dim) else dim for dim in rule.dims)
            rule = rule if tensor.shape == mine else rule._replace(dims=other)
    if len(tensor.shape) != len(rule.dims):
        raise DamagedError(
            f"{short(tensor.name)} has {counted(tensor.shape, 'dimension')} {list(tensor.shape)} where the config "
            f"implies {len(rule.dims)}; config.json and the weights are not of one model"
        )
    dims: list[Dim] = []
    for at, (dim, length) in enumerate(zip(rule.dims, tensor.shape, strict=True)):
        implied = length if dim is None else dim if isinstance(dim, int) else dim.extent
        if implied != length:
            what = "rows" if at == 0 else "columns" if at == 1 else f"entries in dimension {at}"
            raise DamagedError(
                f"{short(tensor.name)} has {length:,} {what} (shape {list(tensor.shape)}) but the config "
                f"implies {implied:,}; config.json and the weights are not of one model, "
                "or a count such as head_dim is missing from it"
            )
        dims.append(dim if isinstance(dim, Dim) else replicated(length))
    return tuple(dims)


def _require_complete(
    table: Table, number: int, stack: Stack, entries: Sequence[_Entry], present: Mapping[int, list[tuple[int, ...]]]
) -> None:
    """Every mandatory tensor of a stack is there, and none of a layer or expert that the config does not promise."""
    layers_of_block: dict[str, set[int]] = {}
    found: list[tuple[_Entry, set[int]]] = []
    outside: list[tuple[_Entry, bool]] = []
    for entry in entries:
        rule, name, places, _ = entry
        numbers = present.get(id(rule), [])
        if "{layer}" not in places:
            outside.append((entry, bool(numbers)))
            continue
        at = places.index("{layer}")
        layers = {n[at] for n in numbers}
        beyond = [layer for layer in layers if layer >= stack.layers + stack.extra_layers]
        if beyond:
            raise DamagedError(
                f"{_filled(name, layer=min(beyond))} is there but the config promises only "
                + counted(stack.layers, "layer")
                + (f" and {stack.extra_layers:,} more for prediction" if stack.extra_layers else "")
                + "; config.json and the weights are not of one model"
            )
        if "{expert}" in places:
            _require_experts(stack, name, places, numbers, layers)
        if not rule.optional:
            layers_of_block.setdefault(rule.block, set()).update(layers)
            found.append((entry, layers))
    _require_outside(table, number, outside, {block for block, layers in layers_of_block.items() if layers})
    # Prediction layers past the last are held to the same as the others as soon as anything of one is there.
    every = set(range(stack.layers)).union(*layers_of_block.values())
    layers_of_block[""] = layers_of_block.get("", set()) | every
    for entry, layers in found:
        own, only = layers_of_block[entry.rule.block] & every, entry.rule.layers
        promised = own if only is None else own & only
        if promised - layers:
            raise DamagedError(
                f"{_filled(entry.name, layer=min(promised - layers))} is missing from the weights "
                f"({len(layers & every)} of {len(promised)} layers have theirs); "
                "download or copy the checkpoint again"
            )
    of_layers = {entry.rule.block for entry in entries if "{layer}" in entry.places}
    for choice in table.choices:
        chosen = every if choice.layers is None else every & choice.layers
        for layer in sorted(chosen) if choice.stack == number and of_layers.intersection(choice.blocks) else ():
            held = [block for block in choice.blocks if layer in layers_of_block.get(block, ())]
            _require_one(f"layer {layer}", choice, held)


def _require_outside(table: Table, number: int, outside: Sequence[tuple[_Entry, bool]], in_layers: set[str]) -> None:
    """What is outside the layers: every mandatory tensor, all of a block or none of it, one block of a choice.

    A block that is in some layer (of no choice between blocks, of which layers may hold several) is there as well.
    """
    held = {entry.rule.block for entry, there in outside if there}
    blocks = {entry.rule.block for entry, _ in outside}
    chosen = {block for choice in table.choices for block in choice.blocks}
    due = held | (in_layers - chosen) | {""}
    for entry, there in outside:
        if not there and not entry.rule.optional and entry.rule.block in due:
            raise DamagedError(f"{entry.name} is missing from the weights; download or copy the checkpoint again")
    for choice in table.choices:
        if choice.stack == number and blocks.intersection(choice.blocks):
            _require_one("the model outside its layers", choice, [block for block in choice.blocks if block in held])


def _require_one(what: str, choice: Choice, held: Sequence[str]) -> None:
    if not held:
        raise DamagedError(f"{what} holds none of: {', '.join(choice.blocks)}; download or copy the checkpoint again")
    if len(held) > 1:
        raise DamagedError(
            f"{what} holds {' and '.join(held)}, of which the model has only one; save the checkpoint again in one form"
        )


def _require_experts(
    stack: Stack, name: str, places: tuple[str, ...], numbers: Sequence[tuple[int, ...]], layers: set[int]
) -> None:
    at_layer, at_expert = places.index("{layer}"), places.index("{expert}")
    held: dict[int, set[int]] = {layer: set() for layer in layers}
    for n in numbers:
        held[n[at_layer]].add(n[at_expert])
    every = set(range(stack.experts))
    for layer, experts in held.items():
        if experts != every:
            wrong = min(experts ^ every)
            state = "is missing from the weights" if wrong in every else "is one too many"
            raise DamagedError(
                f"{_filled(name, layer=layer, expert=wrong)} {state}: the config promises "
                f"{counted(stack.experts, 'expert')} and layer {layer} holds {len(experts):,}; "
                "config.json and the weights are not of one model"
            )


def _filled(name: str, **values: int) -> str:
    for key, value in values.items():
        name = name.replace(f"{{{key}}}", str(value))
    return name


def listed(names: Sequence[str]) -> str:
    """The first few names, for a message, and how many more there are."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(map(short, names[:SHOWN])) + more
