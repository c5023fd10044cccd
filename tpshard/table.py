"""The vocabulary in which a family says how its tensors are cut: names, dimensions and roles.

A table is a list of rules made by a function of the model's config. A rule's name may hold the
placeholders ``{layer}`` and ``{expert}`` (any further ones are free numbers) and start with ``@``
for the prefixes under which checkpoints store the decoder. Exactly one rule must match a tensor,
and every mandatory rule must match: silence never means replicate.

A model of several stacks of layers (encoder and decoder, a tower beside a language model) has a
:class:`Stack` for each, with layers and prefixes of its own; :meth:`Table.include` takes over the
table of a part that is a model by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from .axes import AnyDim, Axis, Dim
from .errors import UnsupportedError

ADDED_ONCE = "added once: whole on every rank, the runtime adds it after the sum over ranks"
NEEDS_SUM = "needs a sum over ranks: the norm spans what is cut"
AFTER_SUM = "after the sum over ranks: the norm spans the residual stream, which every rank has"
BEHIND_PADDING = "its first position is that behind the padding token's id"
NEEDS_GATHER = "needs a gather over ranks: what comes next sees all of it"
NORMED_BY = "needs a sum over ranks before it: what it takes is normed, over all that is cut, by "  # a sibling
PASSES_ON = "some experts only pass their input on: that counts once, whatever number of ranks is summed"
UNUSED = "unused: the model stores it and takes nothing from it"
MOST = 2**16  # a guard against hostile configs: matching lists the layers and experts that must be there

# "01" and numbers beyond any layer's are parts of a name like others: no rule's number stands for them.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,17})(?![^.])")
_PLACE = re.compile(r"\{(\w+)\}")


class Rule(NamedTuple):
    """How the tensors of one name pattern are cut.

    ``dims`` has one entry a dimension: a :class:`Dim`, a whole number (kept whole, of that length),
    or None (kept whole, of any length). ``stack`` is the number of the rule's :class:`Stack`; with
    ``layers`` the rule is of those layers alone, and each of them has its tensor. With ``either_way`` releases
    store the last two dimensions in this order or in the other.
    """

    name: str
    dims: tuple[AnyDim | None, ...]
    role: str
    optional: bool
    block: str
    note: str
    stack: int = 0
    layers: frozenset[int] | None = None
    either_way: bool = False


Prefix: TypeAlias = "str | tuple[str, str]"


@dataclass(frozen=True)
class Stack:
    """Layers that are counted by themselves, and under which prefixes checkpoints store them.

    Args:
        layers: how many layers the config promises; ``{layer}`` runs over them.
        experts: how many experts ``{expert}`` runs over.
        idle_experts: how many experts past the last do nothing; ``{idle}`` runs over their numbers.
        extra_layers: layers past the last that a checkpoint may hold as well (prediction layers).
        prefixes: pairs of what ``@`` stands for and what stands before names without it, most usual first; a
            string is the first of a pair whose second is empty.
        optional: whether a checkpoint may lack the whole stack; where it has any of it, it has all.

    Raises:
        UnsupportedError: more layers or experts than any model has.
    """

    layers: int = 0
    experts: int = 0
    extra_layers: int = 0
    prefixes: Sequence[Prefix] = ("",)
    optional: bool = False
    idle_experts: int = 0

    def __post_init__(self) -> None:
        for what, count in (("layers", self.layers + self.extra_layers), ("experts", self.experts)):
            if count > MOST:
                raise UnsupportedError(
                    f"config.json promises {count} {what}, more than the {MOST} that are supported; correct it"
                )

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The prefixes, all of them as pairs."""
        return tuple((prefix, "") if isinstance(prefix, str) else prefix for prefix in self.prefixes)


def placed(name: str, prefix: tuple[str, str]) -> str:
    """A rule's name under a stack's prefix."""
    inner, outer = prefix
    return name.replace("@", inner, 1) if "@" in name else outer + name


def template_of(name: str) -> tuple[str, tuple[int, ...]]:
    """A tensor name with its numeric parts replaced by ``#``, and those numbers in order."""
    numbers = _NUMBER.findall(name)
    if not numbers:
        return name, ()
    return _NUMBER.sub("#", name), tuple(map(int, numbers))


def placeholders(name: str) -> tuple[str, ...]:
    """The placeholders and literal numbers of a rule's name, in order: ``('{layer}', '0')``."""
    return tuple(part for part in name.split(".") if part.isdigit() or _PLACE.fullmatch(part))


def rule_template(name: str) -> str:
    """A rule's name in the form that :func:`template_of` gives a tensor's."""
    return ".".join("#" if part.isdigit() or _PLACE.fullmatch(part) else part for part in name.split("."))


class Tie(NamedTuple):
    """A tensor that is another where the files do not store it; the names are as in rules of ``stack``."""

    alias: str
    target: str
    stack: int


class Choice(NamedTuple):
    """Every layer of the stack (of ``layers``, where given) holds exactly one of the blocks."""

    blocks: tuple[str, ...]
    stack: int
    layers: frozenset[int] | None


class Shared(NamedTuple):
    """One tensor that the model has under several names, of which a checkpoint holds at least one."""

    names: tuple[str, ...]
    stack: int


@dataclass
class Table:
    """The rules of one model, and what is known of their number.

    ``layers``, ``experts``, ``idle_experts``, ``extra_layers`` and ``prefixes`` are those of the first stack, as in
    :class:`Stack`.

    Raises:
        UnsupportedError: more layers or experts than any model has.
    """

    layers: int
    experts: int = 0
    extra_layers: int = 0
    prefixes: Sequence[Prefix] = ("",)
    rules: list[Rule] = field(default_factory=list)
    tied: list[Tie] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    shares: list[Shared] = field(default_factory=list)
    spellings: list[tuple[int, ...]] = field(default_factory=list)
    modules: list[Rule] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    idle_experts: int = 0
    _block: str = ""
    _stack: int = 0
    _only: frozenset[int] | None = None

    def __post_init__(self) -> None:
        idle = self.idle_experts
        self.stacks.append(Stack(self.layers, self.experts, self.extra_layers, self.prefixes, idle_experts=idle))

    # -- rules ------------------------------------------------------------------------------------

    def tensor(
        self,
        name: str,
        *dims: AnyDim | None,
        role: str,
        optional: bool = False,
        note: str = "",
        either_way: bool = False,
    ) -> None:
        """A tensor with one entry of ``dims`` for each dimension.

        With ``either_way`` its last two dimensions may be stored in the other order, and the shape says which it is:
        Qwen3-VL's experts, whose first files are input x output. Where both lengths agree it is the order given here.
        """
        self.rules.append(Rule(name, dims, role, optional, self._block, note, self._stack, self._only, either_way))

    def whole(self, name: str, *dims: AnyDim | None, why: str, optional: bool = False) -> None:
        """A tensor that every rank holds whole, and why a good engine would keep it so."""
        self.tensor(name, *dims, role="whole", optional=optional, note=f"whole: {why}")

    def whole_module(self, name: str, *, why: str, optional: bool = False) -> None:
        """All that lies below the module ``name`` and no other rule knows, whatever its names and shapes: whole.

        For parts that run once before or after the model and are no transformer (the convolutions that make
        tokens of images or sounds), so that every rank runs all of them. At least one tensor must be there.
        """
        self.modules.append(Rule(name, (), "whole", optional, self._block, f"whole: {why}", self._stack))

    def linear(
        self,
        name: str,
        out: AnyDim | None,
        into: AnyDim | None,
        *,
        role: str,
        bias: bool | None = False,
        optional: bool = False,
        note: str = "",
    ) -> None:
        """``weight [out, in]`` and, where ``bias`` is True (or None: maybe), ``bias [out]``.

        Cut along ``out`` it is column-parallel and its bias is cut along; cut along ``in`` it is
        row-parallel and its bias is added once, after the sum over ranks. ``note`` is the weight's.
        """
        self.tensor(f"{name}.weight", out, into, role=role, optional=optional, note=note)
        self._bias(name, out, into, role, bias, optional)

    def conv1d(
        self, name: str, into: AnyDim | None, out: AnyDim | None, *, role: str, bias: bool | None = True
    ) -> None:
        """Like :meth:`linear` for GPT-2's ``Conv1D``, which stores ``weight [in, out]``."""
        self.tensor(f"{name}.weight", into, out, role=role)
        self._bias(name, out, into, role, bias, False)

    def _bias(
        self, name: str, out: AnyDim | None, into: AnyDim | None, role: str, bias: bool | None, optional: bool
    ) -> None:
        if bias is False:
            return
        note = ADDED_ONCE if isinstance(into, Dim) and not isinstance(out, Dim) else ""
        self.tensor(f"{name}.bias", out, role=f"{role}_bias", optional=optional or bias is None, note=note)

    def norm(self, name: str, width: AnyDim | None, *, bias: bool | None = False, optional: bool = False) -> None:
        """``weight [width]`` (and ``bias``); a norm along something cut needs a sum over ranks."""
        note = NEEDS_SUM if isinstance(width, Dim) else ""
        self.tensor(f"{name}.weight", width, role="norm", optional=optional, note=note)
        if bias is not False:
            self.tensor(f"{name}.bias", width, role="norm_bias", optional=optional or bias is None, note=note)

    def embedding(
        self, name: str, vocab: AnyDim | None, width: AnyDim | None, *, role: str = "embed", note: str = ""
    ) -> None:
        """``weight [vocab, width]``."""
        self.tensor(f"{name}.weight", vocab, width, role=role, note=note)

    def head(
        self, name: str, vocab: AnyDim, width: AnyDim | None, *, tied_to: str | None, bias: bool | None = False
    ) -> None:
        """The output head ``weight [vocab, width]``; with ``tied_to`` it may be absent and is then that tensor."""
        self.tensor(f"{name}.weight", vocab, width, role="head", optional=tied_to is not None)
        self._bias(name, vocab, width, "head", bias, False)
        if tied_to is not None:
            self.tie(f"{name}.weight", tied_to)

    def tie(self, alias: str, target: str) -> None:
        """The tensor ``alias`` is ``target`` where the files do not store it; both names are of one stack."""
        self.tied.append(Tie(alias, target, self._stack))

    def shared(self, *names: str, heads: Sequence[str] = (), vocab: AnyDim, width: AnyDim | None) -> None:
        """One embedding ``[vocab, width]`` under several names, and the output ``heads`` that are tied to it.

        A checkpoint holds at least one of them; the others are the first that it holds.
        """
        for name in names:
            self.tensor(name, vocab, width, role="embed", optional=True)
        for name in heads:
            self.tensor(name, vocab, width, role="head", optional=True)
        self.shares.append(Shared((*names, *heads), self._stack))

    # -- which layers hold what -------------------------------------------------------------------

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Rules inside belong together: a layer holds all of the mandatory ones or none.

        Rules outside any block are held by every layer. Of rules that are of no layer the model holds all or none.
        """
        outer, self._block = self._block, name
        try:
            yield
        finally:
            self._block = outer

    def one_of(self, *blocks: str) -> None:
        """Every layer holds exactly one of these blocks (dense or experts, attention or state space).

        Under :meth:`only` that is said of those layers. Where the blocks have rules that are of no layer, the
        model holds exactly one of them outside its layers, too.
        """
        self.choices.append(Choice(blocks, self._stack, self._only))

    @contextmanager
    def only(self, layers: Iterable[int]) -> Iterator[None]:
        """Rules inside are of these layers alone, where the config says which they are; each of them has them all.

        Two rules of one name that are of different layers may differ in their dimensions.
        """
        outer, self._only = self._only, frozenset(layers)
        try:
            yield
        finally:
            self._only = outer

    # -- parts of the model ------------------------------------------------------------------------

    @contextmanager
    def stack(
        self,
        layers: int = 0,
        *,
        experts: int = 0,
        extra_layers: int = 0,
        prefixes: Sequence[Prefix] = ("",),
        optional: bool = False,
    ) -> Iterator[int]:
        """Rules inside are of a :class:`Stack` of their own; gives its number."""
        outer = self._stack
        self.stacks.append(Stack(layers, experts, extra_layers, prefixes, optional))
        self._stack = len(self.stacks) - 1
        try:
            yield self._stack
        finally:
            self._stack = outer

    def one_stack_of(self, *stacks: int) -> None:
        """A checkpoint holds exactly one of these optional stacks: spellings of one model, whose layers differ."""
        self.spellings.append(stacks)

    def include(
        self, part: Table, *prefixes: Prefix, axes: str = "", or_whole: bool = False, optional: bool = False
    ) -> None:
        """Take over the table of a part that is a model by itself: a tower, the language model beside it.

        Args:
            part: its table.
            prefixes: what its ``@`` stands for here, and what stands before its names without ``@``.
            axes: what is put before the names of its axes; no two axes of a model have one name.
            or_whole: ranks that are more than an axis of the part has units hold the part whole.
            optional: whether a checkpoint may lack the part.
        """
        first, pairs = len(self.stacks), Stack(prefixes=prefixes).pairs
        own, *others = part.stacks
        self.stacks.append(replace(own, prefixes=pairs, optional=own.optional or optional))
        for stack in others:
            below = tuple((outer + a, outer + b) for _, outer in pairs for a, b in stack.pairs)
            self.stacks.append(replace(stack, prefixes=below, optional=stack.optional or optional))
        known: dict[Axis, Axis] = {}

        def here(dim: AnyDim | None) -> AnyDim | None:
            if not isinstance(dim, Dim):
                return dim
            for axis in dim.axes:
                known.setdefault(axis, axis.renamed(axes + axis.name, or_whole or axis.or_whole))
            return Dim(tuple([s if s.axis is None else s._replace(axis=known[s.axis]) for s in dim.segments]))

        for rule in part.rules:
            self.rules.append(rule._replace(dims=tuple(map(here, rule.dims)), stack=rule.stack + first))
        self.tied += [tie._replace(stack=tie.stack + first) for tie in part.tied]
        self.choices += [choice._replace(stack=choice.stack + first) for choice in part.choices]
        self.shares += [share._replace(stack=share.stack + first) for share in part.shares]
        self.spellings += [tuple(number + first for number in stacks) for stacks in part.spellings]
        self.modules += [rule._replace(stack=rule.stack + first) for rule in part.modules]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of all rules, each once, in the order of the rules."""
        found: dict[Axis, None] = {}
        for rule in self.rules:
            for dim in rule.dims:
                if isinstance(dim, Dim):
                    found.update(dict.fromkeys(dim.axes))
        return tuple(found)
