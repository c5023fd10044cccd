"""Holds a checkpoint's tensors against a table: every tensor has one rule, every mandatory rule its tensors.

Truth comes from the files: a shape that contradicts the config is refused with both numbers, a tensor
that no rule knows and a tensor that should be there and is not are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .counting import counted
from .errors import DamagedError, UnsupportedError, short
from .partition import Dim, replicated
from .table import Rule, Table, placeholders, rule_template, template_of

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


def match(table: Table, tensors: Iterable[Logical], *, copy_unknown: bool = False) -> Matched:
    """Match all tensors of a checkpoint.

    Raises:
        UnsupportedError: a tensor that no rule knows (unless ``copy_unknown``).
        DamagedError: a tensor is missing, or a shape or number contradicts the config.
    """
    tensors = list(tensors)
    names = [(tensor, *template_of(tensor.name)) for tensor in tensors]
    prefix = _best_prefix(table, {template for _, template, _ in names})
    entries = _entries(table, prefix)
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
            unknown.append(tensor.name)
            dims[tensor.name] = tuple(replicated(length) for length in tensor.shape)
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
            f"{_listed(unknown)}: no rule of the table knows "
            f"{'this tensor' if len(unknown) == 1 else 'these tensors'}, so how to cut is unknown; "
            "use --copy-unknown to keep such tensors whole on every rank"
        )
    _require_complete(table, prefix, present)
    tied = {alias.replace("@", prefix, 1): target.replace("@", prefix, 1) for alias, target in table.tied.items()}
    return Matched(rules, dims, tied, tuple(unknown))


def _best_prefix(table: Table, templates: set[str]) -> str:
    def hits(prefix: str) -> int:
        return sum(rule_template(rule.name.replace("@", prefix, 1)) in templates for rule in table.rules)

    return max(table.prefixes, key=hits)


def _entries(table: Table, prefix: str) -> dict[str, list[_Entry]]:
    entries: dict[str, list[_Entry]] = {}
    for rule in table.rules:
        name = rule.name.replace("@", prefix, 1)
        entries.setdefault(rule_template(name), []).append(_Entry(rule, name, placeholders(name)))
    return entries


def _entry(candidates: Sequence[_Entry], numbers: tuple[int, ...]) -> _Entry | None:
    for entry in candidates:
        if all(place.startswith("{") or int(place) == n for place, n in zip(entry.places, numbers, strict=True)):
            return entry
    return None


def _checked_dims(rule: Rule, tensor: Logical) -> tuple[Dim, ...]:
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


def _require_complete(table: Table, prefix: str, present: Mapping[int, list[tuple[int, ...]]]) -> None:
    layers_of_block: dict[str, set[int]] = {}
    found: list[tuple[Rule, str, set[int]]] = []
    for rule in table.rules:
        name = rule.name.replace("@", prefix, 1)
        places = placeholders(name)
        numbers = present.get(id(rule), [])
        if "{layer}" not in places:
            if not numbers and not rule.optional:
                raise DamagedError(f"{name} is missing from the weights; download or copy the checkpoint again")
            continue
        at = places.index("{layer}")
        layers = {n[at] for n in numbers}
        beyond = [layer for layer in layers if layer >= table.layers + table.extra_layers]
        if beyond:
            raise DamagedError(
                f"{_filled(name, layer=min(beyond))} is there but the config promises only "
                + counted(table.layers, "layer")
                + (f" and {table.extra_layers:,} more for prediction" if table.extra_layers else "")
                + "; config.json and the weights are not of one model"
            )
        if "{expert}" in places:
            _require_experts(table, name, places, numbers, layers)
        if not rule.optional:
            layers_of_block.setdefault(rule.block, set()).update(layers)
            found.append((rule, name, layers))
    # Prediction layers past the last are held to the same as the others as soon as anything of one is there.
    every = set(range(table.layers)).union(*layers_of_block.values())
    layers_of_block[""] = layers_of_block.get("", set()) | every
    for rule, name, layers in found:
        lacking = (layers_of_block[rule.block] & every) - layers
        if lacking:
            raise DamagedError(
                f"{_filled(name, layer=min(lacking))} is missing from the weights "
                f"({len(layers & every)} of {len(layers_of_block[rule.block] & every)} layers have theirs); "
                "download or copy the checkpoint again"
            )
    for blocks in table.choices:
        for layer in sorted(every):
            held = [block for block in blocks if layer in layers_of_block.get(block, ())]
            if not held:
                raise DamagedError(
                    f"layer {layer} holds none of: {', '.join(blocks)}; download or copy the checkpoint again"
                )
            if len(held) > 1:
                raise DamagedError(
                    f"layer {layer} holds {' and '.join(held)}, of which the model has only one; "
                    "save the checkpoint again in one form"
                )


def _require_experts(
    table: Table, name: str, places: tuple[str, ...], numbers: Sequence[tuple[int, ...]], layers: set[int]
) -> None:
    at_layer, at_expert = places.index("{layer}"), places.index("{expert}")
    held: dict[int, set[int]] = {layer: set() for layer in layers}
    for n in numbers:
        held[n[at_layer]].add(n[at_expert])
    every = set(range(table.experts))
    for layer, experts in held.items():
        if experts != every:
            wrong = min(experts ^ every)
            state = "is missing from the weights" if wrong in every else "is one too many"
            raise DamagedError(
                f"{_filled(name, layer=layer, expert=wrong)} {state}: the config promises "
                f"{counted(table.experts, 'expert')} and layer {layer} holds {len(experts):,}; "
                "config.json and the weights are not of one model"
            )


def _filled(name: str, **values: int) -> str:
    for key, value in values.items():
        name = name.replace(f"{{{key}}}", str(value))
    return name


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(map(short, names[:SHOWN])) + more
