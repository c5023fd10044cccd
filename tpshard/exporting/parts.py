"""What of the model every tensor holds, in the words that engine tables use.

A word is a tensor's role with fusions taken apart: ``qkv`` holds ``q``, ``k`` and ``v``. Norms have the name of their
module behind it, ``norm input_layernorm``, as an engine calls one otherwise than another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tpshard.axes import Dim
from tpshard.config import Config
from tpshard.errors import UnsupportedError, short
from tpshard.matching import Logical, Matched
from tpshard.roles import COLUMN, ROW, VOCABULARY
from tpshard.table import Table, placeholders, template_of

from .strands import Strand, strands_of

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "kv": ("k", "v"),
    "gate_up": ("gate", "up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "expert_gate_up": ("expert_gate", "expert_up"),
}


class Part(NamedTuple):
    """A tensor, or one strand of it.

    Args:
        word: what it is in the model.
        kind: ``weight``, ``bias``, or "" for what is neither.
        tensor: the tensor that holds it.
        dims: the tensor's dimensions.
        strand: the strand that it is, of the dimension ``at``; None: it is the whole tensor.
        layer: number of its layer, None outside the layers.
        expert: number of its expert, None where it is of none or of all.
        bank: whether the first dimension counts experts.
        flipped: whether the tensor is stored input x output.
        module: path of its module in the checkpoint, without ``weight`` or ``bias``.
    """

    word: str
    kind: str
    tensor: Logical
    dims: tuple[Dim, ...]
    strand: Strand | None
    at: int
    layer: int | None
    expert: int | None
    bank: bool
    flipped: bool
    module: str

    @property
    def is_expert(self) -> bool:
        return self.bank or self.expert is not None

    @property
    def parent(self) -> str:
        """The module that holds its module; for an expert's matrix the module of all experts."""
        path = self.module.split(".")
        if self.expert is not None and not self.bank:
            return ".".join(path[: len(path) - 1 - path[::-1].index(str(self.expert))])
        return ".".join(path[:-1])

    @property
    def role_is_buffer(self) -> bool:
        """Whether it is a buffer that releases happen to have saved (rotary frequencies, a causal mask)."""
        return self.word == "buffer"

    @property
    def leaf(self) -> str:
        """The last component of its module's path."""
        return self.module.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Model:
    """A model as engine tables see it.

    Args:
        config: its config.json.
        family: the family whose table it is.
        layers: how many layers it has, prediction layers not counted.
        experts: how many routed experts a layer of experts has.
        tensors: its logical tensors, in the order in which the source stores them.
        matched: their rules and dimensions.
    """

    config: Config
    family: str
    layers: int
    experts: int
    tensors: tuple[Logical, ...]
    matched: Matched

    @property
    def several_stacks(self) -> bool:
        """Whether it has layers that are counted apart: towers, an encoder beside a decoder."""
        return any(rule.stack for rule in self.matched.rules.values())

    @property
    def architecture(self) -> str:
        """The class that runs it, "" where the config names none."""
        return architecture_of(self.config)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the order of the tensors.

        Raises:
            UnsupportedError: a tensor no rule knows, one of a quantised matrix, or a fusion of unknown order.
        """
        return tuple(part for tensor in self.tensors for part in parts_of(tensor, self.matched))

    @cached_property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        targets = [to for to in self.matched.tied.values() if to in self.matched.dims]
        return any(self.matched.rules[to].role == "embed" for to in targets)

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(part.word for part in self.parts)


def architecture_of(config: Config) -> str:
    """The first of the config's ``architectures``, "" where it names none."""
    named = config.values.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def model_of(config: Config, family: str, table: Table, tensors: Iterable[Logical], matched: Matched) -> Model:
    """The model that a table and its matched tensors make."""
    return Model(config, family, table.stacks[0].layers, table.stacks[0].experts, tuple(tensors), matched)


def parts_of(tensor: Logical, matched: Matched) -> list[Part]:
    """The parts of one tensor; raises as :attr:`Model.parts`."""
    rule, dims = matched.rules.get(tensor.name), matched.dims[tensor.name]
    if rule is None:
        raise UnsupportedError(
            f"{short(tensor.name)}: no rule of the table knows this tensor, so no engine's name for it is known"
        )
    role, is_bias = rule.role, rule.role.endswith("_bias")
    if ":" in role:
        raise UnsupportedError(
            f"{short(tensor.name)} is part of a quantised matrix; engine layouts are written of checkpoints that are "
            "not quantised: 'tpshard split --dequantize bf16' and 'tpshard merge' make one"
        )
    role = role.removesuffix("_bias")
    numbers = dict(zip(placeholders(rule.name), template_of(tensor.name)[1], strict=False))
    module, _, last = tensor.name.rpartition(".")
    kind = last if last in ("weight", "bias") else ""
    if not kind:
        module = tensor.name
    bank = role.startswith("expert_") and "{expert}" not in rule.name
    if bank and not kind:  # a bank of matrices is a parameter, not a module with a weight
        kind = "bias" if is_bias else "weight"
    words = FUSED.get(role)
    word = f"{role} {module.rsplit('.', 1)[-1]}" if role == "norm" else role
    base = Part(
        word, "bias" if is_bias and kind == "bias" else kind, tensor, dims, None, 0, numbers.get("{layer}"),
        numbers.get("{expert}"), bank, _flipped(role, dims, bank), module,
    )  # fmt: skip
    if words is None:
        return [base]
    at = next((d for d, dim in enumerate(dims) if len(strands_of(dim)) == len(words)), None)
    if at is None:
        counts = [len(strands_of(dim)) for dim in dims]
        raise UnsupportedError(
            f"{short(tensor.name)} holds {', '.join(words)} in an order that is not known strand by strand "
            f"({counts} strands along its dimensions), so no engine layout can be made of it"
        )
    return [
        base._replace(word=name, strand=strand, at=at) for name, strand in zip(words, strands_of(dims[at]), strict=True)
    ]


def _flipped(role: str, dims: tuple[Dim, ...], bank: bool) -> bool:
    """Whether a matrix is stored input x output: what is cut is not where ``[out, in]`` has it."""
    if len(dims) != 2 + bank:
        return False
    cut = [d - bank for d, dim in enumerate(dims) if dim.axes and d >= bank]
    if not cut:
        return False
    if role in VOCABULARY:
        return cut != [0]
    return (role in ROW and cut == [0]) or (role in COLUMN and cut == [1])

