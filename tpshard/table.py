"""The vocabulary in which a family says how its tensors are cut: names, dimensions and roles.

A table is a list of rules made by a function of the model's config. A rule's name may hold the
placeholders ``{layer}`` and ``{expert}`` (any further ones are free numbers) and start with ``@``
for the prefixes under which checkpoints store the decoder. Exactly one rule must match a tensor,
and every mandatory rule must match: silence never means replicate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from .errors import UnsupportedError
from .partition import AnyDim, Axis, Dim

ADDED_ONCE = "added once: whole on every rank, the runtime adds it after the sum over ranks"
NEEDS_SUM = "needs a sum over ranks: the norm spans what is cut"
MOST = 2**16  # a guard against hostile configs: matching lists the layers and experts that must be there

# "01" and numbers beyond any layer's are parts of a name like others: no rule's number stands for them.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,17})(?![^.])")
_PLACE = re.compile(r"\{(\w+)\}")


class Rule(NamedTuple):
    """How the tensors of one name pattern are cut.

    ``dims`` has one entry a dimension: a :class:`Dim`, a whole number (kept whole, of that length),
    or None (kept whole, of any length).
    """

    name: str
    dims: tuple[AnyDim | None, ...]
    role: str
    optional: bool
    block: str
    note: str


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


@dataclass
class Table:
    """The rules of one model, and what is known of their number.

    Args:
        layers: how many layers the config promises; ``{layer}`` runs over them.
        experts: how many experts ``{expert}`` runs over.
        extra_layers: layers past the last that a checkpoint may hold as well (prediction layers).
        prefixes: what ``@`` stands for, most usual first.

    Raises:
        UnsupportedError: more layers or experts than any model has.
    """

    layers: int
    experts: int = 0
    extra_layers: int = 0
    prefixes: Sequence[str] = ("",)
    rules: list[Rule] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    choices: list[tuple[str, ...]] = field(default_factory=list)
    _block: str = ""

    def __post_init__(self) -> None:
        for what, count in (("layers", self.layers + self.extra_layers), ("experts", self.experts)):
            if count > MOST:
                raise UnsupportedError(
                    f"config.json promises {count} {what}, more than the {MOST} that are supported; correct it"
                )

    # -- rules ------------------------------------------------------------------------------------

    def tensor(self, name: str, *dims: AnyDim | None, role: str, optional: bool = False, note: str = "") -> None:
        """A tensor with one entry of ``dims`` for each dimension."""
        self.rules.append(Rule(name, dims, role, optional, self._block, note))

    def linear(
        self,
        name: str,
        out: AnyDim | None,
        into: AnyDim | None,
        *,
        role: str,
        bias: bool | None = False,
        optional: bool = False,
    ) -> None:
        """``weight [out, in]`` and, where ``bias`` is True (or None: maybe), ``bias [out]``.

        Cut along ``out`` it is column-parallel and its bias is cut along; cut along ``in`` it is
        row-parallel and its bias is added once, after the sum over ranks.
        """
        self.tensor(f"{name}.weight", out, into, role=role, optional=optional)
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
            self.tensor(f"{name}.bias", width, role="norm_bias", optional=optional or bias is None)

    def embedding(self, name: str, vocab: AnyDim, width: AnyDim | None, *, role: str = "embed") -> None:
        """``weight [vocab, width]``."""
        self.tensor(f"{name}.weight", vocab, width, role=role)

    def head(self, name: str, vocab: AnyDim, width: int, *, tied_to: str | None, bias: bool | None = False) -> None:
        """The output head ``weight [vocab, width]``; with ``tied_to`` it may be absent and is then that tensor."""
        self.tensor(f"{name}.weight", vocab, width, role="head", optional=tied_to is not None)
        self._bias(name, vocab, width, "head", bias, False)
        if tied_to is not None:
            self.tied[f"{name}.weight"] = tied_to

    # -- which layers hold what -------------------------------------------------------------------

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Rules inside belong together: a layer holds all of the mandatory ones or none.

        Rules outside any block are held by every layer.
        """
        outer, self._block = self._block, name
        try:
            yield
        finally:
            self._block = outer

    def one_of(self, *blocks: str) -> None:
        """Every layer holds exactly one of these blocks (dense or experts, attention or state space)."""
        self.choices.append(blocks)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of all rules, each once, in the order of the rules."""
        found: dict[Axis, None] = {}
        for rule in self.rules:
            for dim in rule.dims:
                if isinstance(dim, Dim):
                    found.update(dict.fromkeys(dim.axes))
        return tuple(found)
