"""The text of a derived table: a converter like the written ones, ready to read and commit."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpshard.table import ADDED_ONCE, NEEDS_SUM

from .draft import AxisDraft, Draft, RuleDraft
from .numbers import Expression, variable
from .variation import Path

WIDTH = 120
_NOTES = {ADDED_ONCE: "ADDED_ONCE", NEEDS_SUM: "NEEDS_SUM"}


class Origin(NamedTuple):
    """What the table was derived from."""

    model_type: str
    class_name: str
    module: str
    version: str


def written(draft: Draft, origin: Origin, defaults: Mapping[Path, Expression]) -> str:
    """The table's source text; formatted like the rest of the code where a formatter is at hand."""
    body = [*_numbers(draft, defaults), "", *_axes(draft.axes), "", *_table(draft), "    return t"]
    source = "\n".join(body)
    names = _names_used(source)
    notes = sorted(name for name in _NOTES.values() if name in source)
    head = [
        f'"""{origin.class_name}, derived: tpshard worked this table out by experiment on the model\'s own code.',
        "",
        *textwrap.wrap(
            f"Source: {origin.module}, run small with transformers {origin.version}. ``tpshard derive`` found and "
            "proved it again wherever it is run.", WIDTH,
        ),
        *_told(draft),
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from tpshard.config import Config",
        *([f"from tpshard.axes import {', '.join(names)}"] if names else []),
        f"from tpshard.table import {', '.join([*notes, 'Table'])}",
        "",
        f'FAMILY = "{origin.model_type}-derived"',
        f'MODEL_TYPES = ("{origin.model_type}",)',
        "",
        "",
        "def table(c: Config) -> Table:",
    ]  # fmt: skip
    return "\n".join([*head, *body]) + "\n"


def _told(draft: Draft) -> list[str]:
    """What a reader has to know: numbers that follow no key."""
    constants = sorted({e.source for e in draft.used if e.constant and e.source != "1"}, key=int)
    out: list[str] = []
    if constants:
        out += ["", *textwrap.wrap(
            f"Numbers that were the same in every config tried stand as they are: {', '.join(constants)}.", WIDTH
        )]  # fmt: skip
    return out


def _names_used(body: str) -> list[str]:
    return [name for name in ("Dim", "Heads", "Padded", "Segment", "Units", "replicated") if f"{name}(" in body]


def _numbers(draft: Draft, defaults: Mapping[Path, Expression]) -> list[str]:
    """The lines that read the config, each key once, those that another's default needs first."""
    needed: dict[Path, None] = {}

    def add(keys: Sequence[Path]) -> None:
        for key in keys:
            if key not in needed:
                if key in defaults:
                    add(defaults[key].keys)
                needed[key] = None

    for e in draft.used:
        add(e.keys)
    holders: dict[Path, str] = {(): "c"}
    lines: list[str] = []
    for key in needed:
        for depth in range(1, len(key)):
            around = key[:depth]
            if around not in holders:
                holders[around] = "_".join(around)
                lines.append(f'    {holders[around]} = {holders[around[:-1]]}.nested("{around[-1]}")')
        default = defaults.get(key)
        more = "" if default is None else f", default={default.source}"
        lines.append(f'    {variable(key)} = {holders[key[:-1]]}.count("{key[-1]}"{more})')
    return lines


def _axes(axes: Sequence[AxisDraft]) -> list[str]:
    out = []
    for axis in axes:
        if axis.padded:
            out.append(f'    {axis.name} = Padded("{axis.name}", {axis.units.source})')
        elif axis.groups is not None:
            out.append(f'    {axis.name} = Heads("{axis.name}", {axis.units.source}, {axis.groups.source})')
        else:
            out.append(f'    {axis.name} = Units("{axis.name}", {axis.units.source}, noun="{axis.noun}")')
    return out


def _table(draft: Draft) -> list[str]:
    more = "" if draft.experts is None else f", experts={draft.experts.source}"
    out = [f"    t = Table(layers={0 if draft.layers is None else draft.layers.source}{more})"]
    every = draft.layer_numbers
    blocks: dict[frozenset[int], list[RuleDraft]] = {}
    for rule in draft.rules:
        if rule.layers is None or rule.layers == every:
            out.append(f"    {_rule(rule)}")
        else:
            blocks.setdefault(rule.layers, []).append(rule)
    names: dict[frozenset[int], str] = {}
    for layers, rules in blocks.items():
        names[layers] = next(n for n in _block_names(rules) if n not in names.values())
        out += [f'    with t.block("{names[layers]}"):', *(f"        {_rule(rule)}" for rule in rules)]
    for chosen in _choices(list(blocks), every):
        out.append(f"    t.one_of({', '.join(chr(34) + names[one] + chr(34) for one in chosen)})")
    out += [f'    t.tie("{alias}", "{target}")' for alias, target in draft.tied]
    return out


def _block_names(rules: Sequence[RuleDraft]) -> list[str]:
    words = [word for word in rules[0].name.partition("{layer}.")[2].split(".") if word.isidentifier()]
    first = words[0] if words else "layer"
    longer = "_".join(words[:2])
    return [first, longer, *(f"{first}_{n}" for n in range(2, 999))]


def _choices(sets: list[frozenset[int]], every: frozenset[int]) -> list[list[frozenset[int]]]:
    """Sets of layers of which each layer is in exactly one."""
    out = []
    left = list(sets)
    while left:
        first = left.pop(0)
        chosen, covered = [first], first
        for other in list(left):
            if not covered & other:
                chosen.append(other)
                covered |= other
        if covered == every and len(chosen) > 1:
            out.append(chosen)
            left = [one for one in left if one not in chosen]
    return out


def _rule(rule: RuleDraft) -> str:
    dims = ", ".join("None" if dim is None else dim for dim in rule.dims)
    dims = dims and dims + ", "
    optional = ", optional=True" if rule.optional else ""
    if rule.role == "whole":
        why = (rule.why or "nothing that is cut meets it").replace('"', "'")
        return f't.whole("{rule.name}", {dims}why="{why}"{optional})'
    note = f", note={_NOTES[rule.note]}" if rule.note else ""
    return f't.tensor("{rule.name}", {dims}role="{rule.role}"{note}{optional})'
