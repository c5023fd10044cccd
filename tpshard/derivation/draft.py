"""The table of what was found: rules with their dimensions as expressions over the config.

The same tensor of every layer gets one rule. The labels of its indices, in stored order, are read as the
sums of which :mod:`tpshard.axes` makes dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpshard.table import ADDED_ONCE, NEEDS_SUM, template_of

from .numbers import Expression, Numbers
from .roles import family_of, noun_of, once_role, role_of, whole_role
from .segments import Part, parts
from .structure import AxisFound, Structure

MOST_FETCHED = 3.5  # cost of an expression for a length that is kept whole; beyond it any length is allowed

@dataclass
class AxisDraft:
    """An axis with its counts as expressions; ``groups`` is None where units share nothing."""

    name: str
    units: Expression
    groups: Expression | None
    padded: bool = False
    noun: str = "units"


@dataclass
class RuleDraft:
    """A rule; dimensions as source text (None: any length)."""

    name: str
    dims: list[str | None]
    role: str
    note: str = ""
    why: str = ""
    layers: frozenset[int] | None = None
    optional: bool = False
    cut: str = ""  # the axis


@dataclass
class Draft:
    """A table that is not written yet; ``remarks`` are what a reader has to know about its numbers."""

    axes: list[AxisDraft] = field(default_factory=list)
    rules: list[RuleDraft] = field(default_factory=list)
    used: list[Expression] = field(default_factory=list)
    layers: Expression | None = None
    experts: Expression | None = None
    tied: list[tuple[str, str]] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    layer_numbers: frozenset[int] = frozenset()

class Drafter:
    """Makes one draft of the structures of several configs, the checkpoint's own first."""

    def __init__(
        self,
        structures: Sequence[Structure],
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
        numbers: Numbers,
        tied: Sequence[tuple[str, str]],
        plain: bool = False,
    ) -> None:
        self.structures, self.shapes, self.numbers = structures, shapes, numbers
        self._plain = plain  # roles that say no more than what is summed over ranks
        self.draft = Draft(tied=list(tied))
        self._summed: set[str] = set()  # modules whose results are summed over ranks
        self._of = structures[0].patterns.of
        self._patterns = [s.patterns.sorted(one) for s, one in zip(structures, shapes, strict=True)]
        self._layers, self._experts = _places(shapes[0])

    def make(self) -> Draft:
        """The draft."""
        draft = self.draft
        draft.layer_numbers = frozenset(self._layers)
        draft.layers = self._count(tuple(len(_places(one)[0]) for one in self.shapes))
        draft.experts = self._count(tuple(len(_places(one)[1]) for one in self.shapes))
        draft.used += [e for e in (draft.layers, draft.experts) if e is not None]
        vocab = self._vocabulary()
        cuts = self._cuts()
        self._summed = {pattern.rpartition(".")[0] for pattern, (*_, summed) in cuts.items() if summed}
        for pattern, names in self._patterns[0].items():
            self._rule(pattern, names, cuts.get(pattern), vocab)
        return draft

    # -- counts -----------------------------------------------------------------------------------

    def _count(self, values: tuple[int, ...]) -> Expression | None:
        if not values[0]:
            return None
        usual = [
            Expression(path[-1], (path,))
            for path, own in self.numbers.values.items()
            if own == values and re.search(r"layers?$|blocks$|depth$|experts$", path[-1])
        ]
        return usual[0] if usual else self.numbers.fit(values)

    def _say(self, values: tuple[int, ...], where: str) -> str | None:
        """A number as source text; one that no key gives is said in a remark. None: it cannot be said."""
        found = self.numbers.fit(values)
        if found is None:
            self.draft.remarks.append(f"{where} is {values[0]}: it matched no key of the config")
            return None
        self.draft.used.append(found)
        return found.source

    def _vocabulary(self) -> dict[str, tuple[int, AxisDraft]]:
        """The axis of each tensor along a vocabulary, and the dimension."""
        out: dict[str, tuple[int, AxisDraft]] = {}
        by_count: dict[tuple[int, ...], AxisDraft] = {}
        first = self.structures[0]
        found = {self._of(name): (name, dim) for name, dim in first.vocabulary.items()}
        for name in first.tables:
            found.setdefault(self._of(name), (name, 0))
        for pattern, (_, dim) in found.items():
            counts = tuple(
                shapes[own[pattern][0]][dim]
                for own, shapes in zip(self._patterns, self.shapes, strict=True)
                if pattern in own
            )
            e = self.numbers.fit(counts) if len(counts) == len(self.shapes) else None
            if e is None or not any("vocab" in key[-1] and "type" not in key[-1] for key in e.keys):
                continue  # positions, token types: small, and whole
            axis = by_count.get(counts)
            if axis is None:
                word = "vocab" if not by_count else f"vocab_{len(by_count) + 1}"
                axis = by_count[counts] = AxisDraft(word, e, None, True, "vocabulary rows")
                self.draft.axes.append(axis)
                self.draft.used.append(e)
            out[pattern] = (dim, axis)
        return out

    # -- cuts -------------------------------------------------------------------------------------

    def _cuts(self) -> dict[str, tuple[int, str, AxisDraft, bool]]:
        """By pattern the cut dimension, its source text, its axis, and whether it is summed over."""
        out: dict[str, tuple[int, str, AxisDraft, bool]] = {}
        for key in dict.fromkeys(axis.sums for axis in self.structures[0].axes):
            own = [[axis for axis in s.axes if axis.sums == key] for s in self.structures]
            if not all(own):
                self._leave(own[0], "it is cut in another way with other numbers in the config")
                continue
            by_kind: dict[tuple[str, ...], list[list[AxisFound]]] = {}
            for n, axes in enumerate(own):
                for axis in axes:
                    kind = tuple(sorted({self._of(name) for name in axis.tensors}))
                    by_kind.setdefault(kind, [[] for _ in own])[n].append(axis)
            for kinds in by_kind.values():
                self._cut(kinds, out, by_kind)
        return out

    def _cut(
        self,
        kinds: list[list[AxisFound]],
        out: dict[str, tuple[int, str, AxisDraft, bool]],
        every: Mapping[tuple[str, ...], object],
    ) -> None:
        if not all(kinds):
            self._leave(kinds[0], "it is cut in another way with other numbers in the config")
            return
        shared = all(any(a.units != a.groups for a in axes) or any(a.groups > 1 for a in axes) for axes in kinds)
        counts = [{(a.units, a.groups) for a in axes} for axes in kinds]
        if any(len(one) > 1 for one in counts):
            self._leave(kinds[0], "the number of its units differs from layer to layer")
            return
        units = tuple(axes[0].units for axes in kinds)
        groups = tuple(axes[0].groups for axes in kinds)
        name = self._name_of(kinds[0][0])
        e = self.numbers.fit(units)
        g = self.numbers.fit(groups) if groups != units and shared else None
        if e is None or (groups != units and shared and g is None):
            self._leave(kinds[0], f"its {units[0]} units match no key of the config")
            return
        axis = AxisDraft(name, e, g, noun=noun_of(name))
        cuts: dict[str, tuple[int, str, AxisDraft, bool]] = {}
        for tensor in kinds[0][0].tensors:
            pattern = self._of(tensor)
            found = self._dim(pattern, kinds, axis)
            if found is None:
                self._leave([kinds[0][0]], f"the order of {tensor} cannot be said in a table")
                return
            cuts[pattern] = (*found, axis, tensor in kinds[0][0].ends)
        self.draft.axes.append(axis)
        self.draft.used += [x for x in (e, g) if x is not None]
        out |= cuts

    def _name_of(self, axis: AxisFound) -> str:
        """A name for an axis: the module around its first sum."""
        taken = {one.name for one in self.draft.axes}
        words = [w for w in min(axis.ends).split(".") if not w.isdigit() and w not in ("weight", "model", "layers")]
        around = words[-2] if len(words) > 1 else words[-1]
        usual = {"self_attn": "heads", "attn": "heads", "attention": "heads", "self_attention": "heads", "mlp": "ffn",
                 "feed_forward": "ffn", "experts": "expert_ffn", "shared_expert": "shared_ffn",
                 "shared_experts": "shared_ffn"}  # fmt: skip
        name = usual.get(around, around)
        name = name if name.isidentifier() else "units"
        return next(n for n in (name, *(f"{name}_{i}" for i in range(2, 99))) if n not in taken)

    def _leave(self, axes: Sequence[AxisFound], why: str) -> None:
        for axis in axes:
            for tensor in axis.tensors:
                self.draft.whole.setdefault(self._of(tensor), why)

    def _dim(self, pattern: str, kinds: list[list[AxisFound]], axis: AxisDraft) -> tuple[int, str] | None:
        read: list[list[Part]] = []
        dims = set()
        for axes in kinds:
            forms = set()
            for one in axes:
                for tensor, (dim, labels) in one.tensors.items():
                    if self._of(tensor) == pattern:
                        dims.add(dim)
                        form = parts(labels, one.units, one.groups)
                        forms.add(None if form is None else tuple(form))
            if len(forms) != 1 or None in forms:
                return None
            read.append(list(next(iter(forms))))  # type: ignore[arg-type]
        if len(dims) != 1 or len({tuple((p.kind, len(p.inner)) for p in form) for form in read}) != 1:
            return None
        words: list[str] = []
        for column in zip(*read, strict=True):
            word = self._part(column, axis, pattern)
            if word is None:
                return None
            if words and words[-1].split(" * ")[0] == word and "for " not in word:
                head, _, times = words[-1].rpartition(" * ")
                words[-1] = f"{word} * {int(times) + 1}" if head == word else f"{word} * 2"
            else:
                words.append(word)
        return next(iter(dims)), " + ".join(words)

    def _part(self, column: Sequence[Part], axis: AxisDraft, pattern: str) -> str | None:
        first = column[0]
        size = self._say(tuple(p.size for p in column), f"a size in {pattern}") if first.size else "0"
        if size is None:
            return None
        heads = axis.groups is not None
        if first.kind == "whole":
            return f"replicated({size})"
        if first.kind == "unit":
            return f"{axis.name}.query({size})" if heads else f"{axis.name}.each({'' if size == '1' else size})"
        if first.kind == "group":
            return f"{axis.name}.kv({size})" if heads else None
        if first.kind == "blocks":
            view = "query" if heads else "unit"
            count = self._say(tuple(p.block for p in column), f"the units of a block of {pattern}")
            times = first.inner[0][1]
            if count is None or any(p.inner[0][1] != times for p in column):
                return None
            return (
                f'Dim(tuple(Segment({axis.name}, "{view}", at, at + {count}, {size}) '
                f"for at in range(0, {axis.units.source}, {count}) for _ in range({times})))"
            )
        sizes = [
            self._say(tuple(p.inner[n][1] for p in column), f"a size in {pattern}") for n in range(len(first.inner))
        ]
        if None in sizes or not heads:
            return None
        kinds = [kind for kind, _ in first.inner]
        if kinds[0] == "unit" and "unit" not in kinds[1:]:
            return f"{axis.name}.grouped({', '.join(str(s) for s in sizes)})"
        inside = ", ".join(
            f'Segment({axis.name}, "query", at * {axis.name}.group, (at + 1) * {axis.name}.group, {s})'
            if kind == "unit"
            else f'Segment({axis.name}, "kv", at, at + 1, {s})'
            for kind, s in zip(kinds, sizes, strict=True)
        )
        assert axis.groups is not None
        return f"Dim(tuple(s for at in range({axis.groups.source}) for s in ({inside})))"

    # -- rules ------------------------------------------------------------------------------------

    def _rule(
        self,
        pattern: str,
        names: list[str],
        cut: tuple[int, str, AxisDraft, bool] | None,
        vocab: Mapping[str, tuple[int, AxisDraft]],
    ) -> None:
        first = self.structures[0]
        dims: list[str | None] = [self._whole_dim(pattern, n) for n in range(len(self.shapes[0][names[0]]))]
        note = why = axis = ""
        if pattern in vocab:
            at, along = vocab[pattern]
            dims[at] = f"{along.name}.each()"
            is_table = any(name in first.tables for name in names)
            role = "embed" if is_table else "head" if len(dims) > 1 else "head_bias"
            axis = along.name
        elif cut is not None:
            at, text, along, summed = cut
            dims[at] = text
            axis = along.name
            role = role_of(pattern, "linear" if self._plain else family_of(along.name), summed, len(dims))
            if any(name in first.spanning for name in names):
                role, note = ("norm" if pattern.endswith("weight") else "norm_bias"), NEEDS_SUM
        elif any(name in first.once for name in names) and pattern.rpartition(".")[0] in self._summed:
            role, note = "linear_out_bias" if self._plain else once_role(pattern), ADDED_ONCE
        else:
            role, why = whole_role(pattern, len(dims)), self.draft.whole.get(pattern, "")
            if role == "whole" and any(name in first.inside for name in names):
                role = "inside"
        for name, layers in self._named(names):
            self.draft.rules.append(RuleDraft(name, list(dims), role, note, why, layers, False, axis))

    def _whole_dim(self, pattern: str, dim: int) -> str | None:
        """The length of a dimension that is kept whole, where keys of the config give it; None: any length."""
        values = []
        for own, shapes in zip(self._patterns, self.shapes, strict=True):
            if pattern not in own:
                return None
            lengths = {shapes[name][dim] for name in own[pattern]}
            if len(lengths) != 1:
                return None
            values.append(next(iter(lengths)))
        found = self.numbers.fit(tuple(values))
        if found is None or found.constant or found.cost > MOST_FETCHED:
            return None
        self.draft.used.append(found)
        return found.source

    def _named(self, names: list[str]) -> list[tuple[str, frozenset[int] | None]]:
        """Names with placeholders in place of the numbers of layers and experts, and the layers that hold them."""
        out: dict[str, set[int]] = {}
        for name in names:
            numbers = template_of(name)[1]
            words: list[str] = []
            layer: int | None = None
            n = 0
            for word in name.split("."):
                if word.isdigit():
                    if n == 0 and numbers[0] in self._layers and self._is_layered(name):
                        layer, word = numbers[0], "{layer}"
                    elif "{layer}" in words and words[-1] == "experts" and self._experts:
                        word = "{expert}"
                    n += 1
                words.append(word)
            out.setdefault(".".join(words), set()).update(set() if layer is None else {layer})
        return [(name, frozenset(layers) if layers else None) for name, layers in out.items()]

    def _is_layered(self, name: str) -> bool:
        return _stack_of(name) == _main_stack(self.shapes[0])


def _stack_of(name: str) -> str:
    found = re.match(r"(.*?)\.\d+\.", name)
    return found[1] if found else ""


def _main_stack(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What stands before the numbers of the layers: the list with the most tensors."""
    counts: dict[str, int] = {}
    for name in shapes:
        stack = _stack_of(name)
        if stack:
            counts[stack] = counts.get(stack, 0) + 1
    return max(counts, key=lambda s: counts[s], default="")


def _places(shapes: Mapping[str, tuple[int, ...]]) -> tuple[set[int], set[int]]:
    """The numbers of layers, and of experts."""
    stack = _main_stack(shapes)
    layers = {template_of(name)[1][0] for name in shapes if stack and _stack_of(name) == stack}
    experts = {int(found[1]) for name in shapes if (found := re.search(r"\.experts\.(\d+)\.", name))}
    return layers, experts
