"""From a model and an engine's table to a layout: every part under its name, on its ranks, in its order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from tpshard.axes import Axis, Heads, Padded
from tpshard.collection import uncollected
from tpshard.degrees import equal_degrees, listed
from tpshard.errors import UnsupportedError, short
from tpshard.intervals import dealt
from tpshard.layout import Layout, Piece, Stored

from .enginetable import GROUPED, WHOLE, EngineTable, Entry
from .forms import Forms
from .grid import Grid
from .parts import Model, Part

Shapes = tuple["tuple[int, ...] | None", ...]


class Fixed(NamedTuple):
    """A constant as it is stored: the same bytes on the ranks that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    ranks: frozenset[int]


@dataclass(frozen=True)
class Arranged:
    """An engine's layout of a model.

    Args:
        layout: of all ranks of the grid, without what the engine does without.
        declared: the shape under which every stored tensor is filed on every rank.
        fixed: constants beside them.
        dropped: why the engine does without a tensor, by its name.
        origins: of a chunked layout by stored tensor and rank where the rank's rectangle begins in the whole tensor.
    """

    grid: Grid
    layout: Layout
    declared: tuple[Shapes, ...]
    fixed: tuple[Fixed, ...]
    dropped: Mapping[str, str]
    origins: tuple[Shapes, ...] = ()

    @cached_property
    def key(self) -> str:
        """sha256 over what the engine's files hold, hex: the same however the checkpoint spells its tensors."""
        state = hashlib.sha256(repr(self.grid.ranks).encode())
        for stored, shapes in zip(self.layout.stored, self.declared, strict=True):
            state.update(f"{stored.name}\0{stored.dtype}\0{shapes}\n".encode("utf-8", "surrogatepass"))
        return state.hexdigest()


@dataclass
class _Group:
    """The parts that are stored under one name."""

    entry: Entry
    stages: set[int]
    members: list[tuple[tuple[int, ...], Part]] = field(default_factory=list)


@uncollected()
def arrange(model: Model, table: EngineTable, grid: Grid, engine: str) -> Arranged:
    """Lay a model out as an engine stores it.

    Raises:
        UnsupportedError: the table has no place for a tensor, or the engine cannot load such a degree; the message
            names the tensor, and the degrees that it can.
    """
    if model.several_stacks:
        raise UnsupportedError(
            f"a model of the family {model.family} has several stacks of layers; the layout of {engine} is known of "
            "language models with one"
        )
    dropped: dict[str, str] = {}
    kept: list[Part] = []
    for part in model.parts:
        why = table.drop(part)
        if not why and model.tied and part.word == "head":
            why = "it is tied to the embedding, from which it is made"
        if not why and part.role_is_buffer:
            why = "a buffer that the engine makes itself"
        if why:
            dropped[part.tensor.name] = why
        else:
            kept.append(part)
    if not kept:
        raise UnsupportedError(f"{engine} stores none of this model's tensors")
    _require_degree(kept, table, grid, engine)
    words = words_of(kept, model)
    groups: dict[tuple[str, int, int], _Group] = {}
    fixed: dict[str, Fixed] = {}
    for part in kept:
        for shown, stages in _stages(part, model, table, grid):
            entry = entry_of(shown, words, table, engine)
            if shown.flipped and not table.flips and entry.form != WHOLE:
                raise UnsupportedError(
                    f"{short(part.tensor.name)} is stored input x output where {engine} holds output x input; exports "
                    "move bytes and do not transpose"
                )
            for single in singles(shown, entry):
                _add(groups, single, entry, stages, table, grid, model.experts)
            for constant in entry.beside:
                name = rendered(constant.name, shown, table, _number(shown, table, grid, stages))
                on = frozenset(n for n, rank in enumerate(grid.ranks) if rank.pp in stages)
                fixed[name] = Fixed(name, constant.dtype, constant.shape, constant.data, on)
    forms = Forms(table, grid, model.experts)
    made = [_stored(name, group, forms, grid, engine) for (name, _, _), group in groups.items()]
    if table.sorted_names:
        made.sort(key=lambda found: found[0].name)
    tensors = {t.name: t for t in model.tensors if t.name not in dropped}
    layout = Layout(len(grid.ranks), tensors, tuple(stored for stored, _ in made))
    return Arranged(grid, layout, tuple(shapes for _, shapes in made), tuple(fixed.values()), dropped)


def _require_degree(parts: Sequence[Part], table: EngineTable, grid: Grid, engine: str) -> None:
    """Raise UnsupportedError where ranks would be unequal and the engine cannot have that."""
    axes: dict[Axis, str] = {}
    for part in parts:
        if part.is_expert and not grid.cuts_experts:
            continue
        for dim in part.dims:
            axes.update(dict.fromkeys((axis for axis in dim.axes if not isinstance(axis, Padded)), part.tensor.name))
    for axis, tensor in axes.items():
        if isinstance(axis, Heads) and not table.kv_shared and grid.tp_size > axis.kv_heads:
            fit = [degree for degree in equal_degrees(axes) if degree <= axis.kv_heads]
            raise UnsupportedError(
                f"{engine} cannot load this model at TP {grid.tp_size}: {short(tensor)} has {axis.kv_heads} KV heads, "
                f"and there ranks do not share one; it can at {listed(fit)}"
            )
        if not axis.is_equal(grid.tp_size) if not table.uneven else not axis.serves(grid.tp_size):
            raise UnsupportedError(
                f"{engine} cannot load this model at TP {grid.tp_size}: {short(tensor)} is cut along '{axis.name}' "
                f"({axis.describe()}), which {grid.tp_size} ranks do not share equally; it can at "
                f"{listed(equal_degrees(axes))}"
            )


def words_of(parts: Iterable[Part], model: Model) -> frozenset[str]:
    """The words that an engine may ask for: a tied model has a head, too."""
    return frozenset(part.word for part in parts) | (frozenset({"head"}) if model.tied else frozenset())


def shown_as(part: Part, model: Model, table: EngineTable) -> tuple[Part, ...]:
    """As what a part is stored: a tied embedding may be the head, too."""
    if part.word != "embed" or not model.tied:
        return (part,)
    words = dict.fromkeys([*table.tied, "embed", *([table.tied_last] if table.tied_last else [])])
    return tuple(part._replace(word=word) for word in words)


def _stages(part: Part, model: Model, table: EngineTable, grid: Grid) -> list[tuple[Part, tuple[int, ...]]]:
    """On which stages a part lies, and as what."""
    last = grid.pp_size - 1
    if part.layer is not None:
        return [(part, (grid.stage_of(part.layer),))]
    if part.word == "embed" and model.tied:
        if last == 0:
            return [(part._replace(word=word), (0,)) for word in table.tied]
        found: list[tuple[Part, tuple[int, ...]]] = [(part, (0,))]
        return [*found, (part._replace(word=table.tied_last), (last,))] if table.tied_last else found
    entry = next((e for e in table.entries if part.word in e.order and part.kind in e.kinds), None)
    stage = entry.stage if entry is not None else ""
    if not stage:
        first = part.word in ("embed", "position", "embed_projection") or "emb" in part.leaf
        stage = "first" if first else "last"
    return [(part, (0 if stage == "first" else last,))]


def entry_of(part: Part, words: frozenset[str], table: EngineTable, engine: str) -> Entry:
    """The entry of a part in a model that has these words; raises as :func:`arrange`."""
    for entry in table.entries:
        if (
            part.kind in entry.kinds
            and (entry.layers is None or part.layer in entry.layers)
            and (part.word in entry.order or entry.words == "*")
            and words.issuperset((*entry.needs.split(), *(entry.order if entry.words != "*" else ())))
            and not words.intersection(entry.lacks.split())
        ):
            return entry
    raise UnsupportedError(
        f"{engine} has no place for {short(part.tensor.name)} ({part.word}{' ' + part.kind if part.kind else ''}): its "
        "table knows no name for such a part, so the model cannot be laid out for it"
    )


def singles(part: Part, entry: Entry) -> list[Part]:
    """Parts with one expert each where the engine names experts, or lays strands beside each other in every one."""
    if not part.bank:
        return [part]
    apart = "{expert}" in entry.name or (part.layer is not None and not _names_layer(template_of_entry(part, entry)))
    return [part._replace(expert=expert) for expert in range(part.dims[0].extent)] if apart else [part]


def _names_layer(template: str) -> bool:
    return any(place in template for place in ("{layer}", "{own}", "{module}", "{parent}", "{outer}"))


def _names_expert(template: str) -> bool:
    return any(place in template for place in ("{expert}", "{own}", "{module}"))


def template_of_entry(part: Part, entry: Entry) -> str:
    return entry.fused if entry.fused and part.strand is not None and not part.bank else entry.name


def rendered(template: str, part: Part, table: EngineTable, layer: int | None, expert: int | None = None) -> str:
    """The name that a template gives a part whose layer has this number, and its expert, where it is another."""
    return template.format(
        own=table.renamed(part.tensor.name), module=table.renamed(part.module), parent=table.renamed(part.parent),
        outer=table.renamed(part.parent).rpartition(".")[0], leaf=part.leaf, kind=part.kind, layer=layer,
        expert=part.expert if expert is None else expert,
    )  # fmt: skip


def _number(part: Part, table: EngineTable, grid: Grid, stages: Sequence[int]) -> int | None:
    """The number of a part's layer as the engine counts."""
    if part.layer is None or not table.local_layers:
        return part.layer
    return part.layer - grid.stages[stages[0]][0]


def _add(
    groups: dict[tuple[str, int, int], _Group], part: Part, entry: Entry, stages: tuple[int, ...], table: EngineTable,
    grid: Grid, model_experts: int,
) -> None:  # fmt: skip
    number, expert_group = None, -1
    if table.local_experts and part.expert is not None and "{expert}" in template_of_entry(part, entry):
        bounds = dealt(part.dims[0].extent if part.bank else model_experts, grid.ep_size)
        expert_group = next(n for n, (start, stop) in enumerate(bounds) if start <= part.expert < stop)
        number = part.expert - bounds[expert_group][0]
    name = rendered(template_of_entry(part, entry), part, table, _number(part, table, grid, stages), number)
    key = (name, stages[0] if table.local_layers else -1, expert_group)
    group = groups.setdefault(key, _Group(entry, set()))
    group.stages.update(stages)
    word = entry.order.index(part.word) if part.word in entry.order else 0
    expert = -1 if part.expert is None else part.expert
    group.members.append(((-1 if part.layer is None else part.layer, expert, word), part))


def _stored(name: str, group: _Group, forms: Forms, grid: Grid, engine: str) -> tuple[Stored, Shapes]:
    members = sorted(group.members, key=lambda member: member[0])
    places = [place for place, _ in members]
    if len(set(places)) < len(places):
        twice = next(part for at, (place, part) in enumerate(members) if place in places[:at])
        raise UnsupportedError(f"{engine}: {short(twice.tensor.name)} and another tensor would both be {short(name)}")
    parts = [part for _, part in members]
    _require_words(name, group.entry, parts, engine)
    pieces: list[Piece] = []
    layers = list(dict.fromkeys(part.layer for part in parts))
    if group.entry.form == GROUPED or len(layers) > 1:
        for layer in layers:
            of_layer = [part for part in parts if part.layer == layer]
            stage = group.stages if layer is None else {grid.stage_of(layer)}
            pieces += forms.pieces(group.entry.form, of_layer, sorted(stage))
    else:
        pieces = forms.pieces(group.entry.form, parts, sorted(group.stages))
    first = parts[0]
    apart = first.bank and first.expert is not None
    dim = first.at if first.bank and not apart and len(pieces) > 1 else 0
    stored = Stored(name, first.tensor.dtype, tuple(pieces), dim)
    others = {part.tensor.dtype for part in parts}
    if len(others) > 1:
        kinds = ", ".join(sorted(others))
        raise UnsupportedError(f"{engine} stores {short(name)} as one tensor; its parts are {kinds}")
    template = template_of_entry(first, group.entry)
    lead_layers = first.layer is not None and not _names_layer(template)
    lead_experts = first.expert is not None and not _names_expert(template)
    return stored, _declared(stored, parts, lead_layers, lead_experts, apart)


def _require_words(name: str, entry: Entry, parts: Sequence[Part], engine: str) -> None:
    """Every layer and expert has all words of the entry."""
    if len(entry.order) < 2:
        return
    held: dict[tuple[int | None, int | None], set[str]] = {}
    for part in parts:
        held.setdefault((part.layer, part.expert), set()).add(part.word)
    for words in held.values():
        lacking = [word for word in entry.order if word not in words]
        if lacking:
            raise UnsupportedError(
                f"{engine} stores {short(name)} of {', '.join(entry.order)} in one tensor; the checkpoint has no "
                f"{', '.join(lacking)} beside {short(parts[0].tensor.name)}"
            )


def _declared(stored: Stored, parts: Sequence[Part], by_layer: bool, by_expert: bool, apart: bool) -> Shapes:
    """Shapes with stacked layers and experts as dimensions of their own, and single experts of a bank without one."""
    out: list[tuple[int, ...] | None] = []
    if not by_layer and not by_expert and not apart:
        return stored.shapes
    for rank, laid in enumerate(stored.shapes):
        if laid is None:
            out.append(None)
            continue
        held = [part for part, piece in zip(parts, stored.pieces, strict=False) if piece.cut.shapes[rank] is not None]
        lead = []
        if by_layer:
            lead.append(len({part.layer for part in (held if len(stored.pieces) == len(parts) else parts)}))
        if by_expert:
            lead.append(len({part.expert for part in held}))
        trail = laid[2:] if apart else laid[1:]
        rows = prod(laid) // max(prod(lead) * prod(trail), 1)
        out.append((*lead, rows, *trail))
    return tuple(out)
