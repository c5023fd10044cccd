"""The table of what was found: rules with their dimensions as expressions over the config.

The same tensor of every layer gets one rule. The labels of its indices, in stored order, are read as the
sums of which :mod:`tpshard.partition` makes dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from tpshard.table import ADDED_ONCE, NEEDS_SUM, template_of

from .numbers import Expression, Numbers
from .reach import unnumbered
from .structure import AxisFound, Label, Structure

MOST_FETCHED = 3.5  # cost of an expression for a length that is kept whole; beyond it any length is allowed


class Part(NamedTuple):
    """A run of segments: ``size`` indices for each unit or group, ``count`` units in each of ``blocks`` blocks.

    ``kind``: ``unit``, ``group``, ``whole``, or ``grouped``: group after group, ``inner`` for each.
    """

    kind: str
    size: int = 0
    inner: tuple[tuple[str, int], ...] = ()
    block: int = 0


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


def parts(labels: Sequence[Label], units: int, groups: int) -> list[Part] | None:
    """Labels read as segments; None where they follow no order that a table can say."""
    runs = [(label, len(list(run))) for label, run in groupby(labels)]
    out: list[Part] = []
    at = 0
    while at < len(runs):
        (kind, number), size = runs[at]
        if kind == "whole":
            out.append(Part("whole", size))
            at += 1
            continue
        count = units if kind == "unit" else groups
        ahead = runs[at : at + count]
        if number == 0 and ahead == [((kind, n), size) for n in range(count)]:
            out.append(Part(kind, size))
            at += count
            continue
        found = _grouped(runs[at:], units, groups) or _blocks(runs[at:], units)
        if found is None:
            return None
        out.append(found[0])
        at += found[1]
    return out


def _grouped(runs: Sequence[tuple[Label, int]], units: int, groups: int) -> tuple[Part, int] | None:
    """Group after group the same: ``q q q k v`` and the like."""
    if groups < 2 or groups == units or len(runs) % groups:
        return None
    each, share = len(runs) // groups, units // groups
    inner: list[tuple[str, int]] | None = None
    for group in range(groups):
        own = list(runs[group * each : (group + 1) * each])
        read: list[tuple[str, int]] = []
        while own:
            (kind, _), size = own[0]
            count = share if kind == "unit" else 1
            first = group * share if kind == "unit" else group
            if kind == "whole" or own[:count] != [((kind, first + n), size) for n in range(count)]:
                return None
            read.append((kind, size))
            own = own[count:]
        if inner is not None and inner != read:
            return None
        inner = read
    assert inner is not None
    return Part("grouped", 0, tuple(inner)), len(runs)


def _blocks(runs: Sequence[tuple[Label, int]], units: int) -> tuple[Part, int] | None:
    """Blocks of some units, in each block several times: CodeGen's ``[4 blocks][q v k][heads of a block]``."""
    size = runs[0][1]
    numbers = [label[1] for label, length in runs if label[0] == "unit" and length == size]
    if len(numbers) != len(runs) or len(runs) % units:
        return None
    times = len(runs) // units
    for block in range(1, units):
        if units % block == 0 and numbers == [
            first + n for first in range(0, units, block) for _ in range(times) for n in range(block)
        ]:
            return Part("blocks", size, (("unit", times),), block), len(runs)
    return None


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
        self._patterns = [_patterns(one) for one in shapes]
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
        found = {unnumbered(name): (name, dim) for name, dim in first.vocabulary.items()}
        for name in first.tables:
            found.setdefault(unnumbered(name), (name, 0))
        for pattern, (name, dim) in found.items():
            counts = tuple(one[_same(name, one)][dim] for one in self.shapes if _same(name, one))
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
                    kind = tuple(sorted({unnumbered(name) for name in axis.tensors}))
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
        axis = AxisDraft(name, e, g, noun=_noun(name))
        cuts: dict[str, tuple[int, str, AxisDraft, bool]] = {}
        for tensor in kinds[0][0].tensors:
            pattern = unnumbered(tensor)
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
                self.draft.whole.setdefault(unnumbered(tensor), why)

    def _dim(self, pattern: str, kinds: list[list[AxisFound]], axis: AxisDraft) -> tuple[int, str] | None:
        read: list[list[Part]] = []
        dims = set()
        for axes in kinds:
            forms = set()
            for one in axes:
                for tensor, (dim, labels) in one.tensors.items():
                    if unnumbered(tensor) == pattern:
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
            role = _role(pattern, "linear" if self._plain else _family(along), summed, len(dims))
            if any(name in first.spanning for name in names):
                role, note = ("norm" if pattern.endswith("weight") else "norm_bias"), NEEDS_SUM
        elif any(name in first.once for name in names) and pattern.rpartition(".")[0] in self._summed:
            role, note = "linear_out_bias" if self._plain else _once_role(pattern), ADDED_ONCE
        else:
            role, why = _whole_role(pattern, len(dims)), self.draft.whole.get(pattern, "")
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


def _patterns(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for name in shapes:
        out.setdefault(unnumbered(name), []).append(name)
    return out


def _same(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The tensor of this pattern in another config's checkpoint; "" for none."""
    pattern = unnumbered(name)
    return name if name in shapes else next((n for n in shapes if unnumbered(n) == pattern), "")


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


_WORDS = (
    (r"(\w+_)?q(_proj|_lin)?|wq|query(_proj|_layer)?", "q"),
    (r"(\w+_)?k(_proj|_lin)?|wk|key(_proj|_layer)?", "k"),
    (r"(\w+_)?v(_proj|_lin)?|wv|value(_proj|_layer)?", "v"),
    (r".*gate_up.*", "gate_up"),
    (r".*gate.*|w1", "gate"),
)


def _family(axis: AxisDraft) -> str:
    for word, family in (("shared", "shared"), ("expert", "expert"), ("heads", "heads"), ("ffn", "ffn")):
        if axis.name.startswith(word):
            return family
    return "linear"


def _role(pattern: str, family: str, summed: bool, rank: int) -> str:
    """The role of a cut tensor, by the part of a layer that it is of and the words of its name."""
    leaf = pattern.removesuffix(".weight").removesuffix(".bias")
    bias = "_bias" if pattern.endswith("bias") and rank == 1 else ""
    if summed:
        return {"heads": "o", "ffn": "down", "expert": "expert_down", "shared": "shared_down"}.get(family, "linear_out")
    if rank == 1 and not bias:
        return {"heads": "attn_head", "ffn": "ffn_channel"}.get(family, "linear_head")
    word = next((role for expression, role in _WORDS if re.fullmatch(expression, leaf.rpartition(".")[2])), "")
    if family == "heads":
        return (word if word in ("q", "k", "v") else "qkv") + bias
    if family == "linear":
        return ("linear_conv" if rank == 3 else "linear_in") + bias
    word = word if word in ("gate", "gate_up") else "up"
    return {"expert": "expert_", "shared": "shared_"}.get(family, "") + word + bias


def _once_role(pattern: str) -> str:
    if "shared_expert" in pattern:
        return "shared_down_bias"
    if "expert" in pattern:
        return "expert_down_bias"
    return "o_bias" if "att" in pattern else "down_bias"


def _whole_role(pattern: str, rank: int) -> str:
    if re.search(r"norm|(^|[._])ln", pattern) and rank == 1:
        return "norm_bias" if pattern.endswith("bias") else "norm"
    if re.search(r"router|(^|[._])gate\.weight$|correction", pattern):
        return "router"
    if re.search(r"position|wpe|token_type", pattern):
        return "position"
    return "whole"


def _noun(name: str) -> str:
    return {"heads": "query heads", "ffn": "feed-forward channels"}.get(name, f"{name.replace('_', ' ')} units")
