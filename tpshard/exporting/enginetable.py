"""The vocabulary in which an engine says what it stores: words of parts, names, fusions, and its own rules.

An engine's table is a module of ``tpshard.converters.engines`` with ``ENGINE`` (its name), ``SUMMARY`` (a line for
``tpshard list engines``), ``VERSIONS`` (a :class:`Version` each) and ``table(model, options) -> EngineTable``. How a
tensor is cut is the family's table's word; an engine's says what it is called, what is laid beside what, and where the
engine goes another way. No engine's table names a family. Where names hang on the class by which the engine runs a
model, they hang on the config's ``architectures``, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .grid import Grid, Rank, StageRule, equal_stages
from .parts import Model, Part

SAFETENSORS, TORCH, DISTCP = "safetensors", "torch", "distcp"

CUT = "cut"
"""As the family cuts it: the rank's units of every strand, strand after strand."""

WHOLE = "whole"
"""On every rank, whatever the family would do."""

GROUPED = "grouped"
"""KV group after KV group ``[q ... q k v]``, then equal parts of all rows: Megatron's ``linear_qkv``."""

PLAIN = "plain"
"""Equal chunks (``torch.chunk``) along the first dimension that the family cuts, heedless of units and fusions."""

ROTARY = "rotary"
"""As CUT, the rows of every head in pairs: HF's halves ``[x0 .. xn y0 .. yn]`` become ``[x0 y0 x1 y1 ..]``."""

ALONG_OTHER = "along the other dimension"
"""Equal parts of the dimension that the family keeps whole: Llama 2's embedding, cut along the hidden width."""


class Constant(NamedTuple):
    """A tensor that the engine demands and no checkpoint holds: the same bytes on every rank.

    ``name`` is a template like an entry's; ``shape`` is ``()`` for a scalar.
    """

    name: str
    dtype: str
    data: bytes
    shape: tuple[int, ...] = ()


class Entry(NamedTuple):
    """What the engine stores under one name.

    Args:
        words: the parts that are laid one after the other, in this order.
        name: a template. ``{own}`` is the checkpoint's name; ``{module}``, ``{parent}`` (the module around it),
            ``{outer}`` (around that) and ``{leaf}`` (its last component) are paths in it, ``{kind}`` is weight or
            bias, ``{layer}`` and ``{expert}`` are numbers. Layers or experts whose number is not in the template are
            stacked along a new first dimension.
        fused: the template where the checkpoint stores the words in one tensor already; "": the same.
        form: how it lies over the ranks.
        kinds: the kinds that it is for; "" in it stands for tensors that are neither weight nor bias.
        needs: words that the model must have for this entry to be the one.
        lacks: words that it must not have.
        beside: what the engine demands beside it.
        stage: ``first`` or ``last`` for what is of no layer; "" as it is usual.
        layers: of which layers it is; None: of all, and of what is of none.
    """

    words: str
    name: str
    fused: str = ""
    form: str = CUT
    kinds: tuple[str, ...] = ("weight", "bias")
    needs: str = ""
    lacks: str = ""
    beside: tuple[Constant, ...] = ()
    stage: str = ""
    layers: frozenset[int] | None = None

    @property
    def order(self) -> tuple[str, ...]:
        """Its words; a norm's have a blank inside and stand alone."""
        return (self.words,) if self.words.startswith("norm ") else tuple(self.words.split())


class Version(NamedTuple):
    """A range of versions of the engine that share names, and what was checked of them and how."""

    name: str
    checked: str


FileName = Callable[[Grid, Rank, int, int], str]
"""``name(grid, rank, part, parts)``: the path of a file below the output."""

Describer = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, str]]
"""``described(origins)``: metadata of a file that holds these tensors."""

SideWriter = Callable[[Model, Grid], Mapping[str, bytes]]


@dataclass(frozen=True)
class EngineTable:
    """What one engine does with one model.

    Args:
        entries: the first that knows a part's word and kind is its entry.
        file_name: the path of every file.
        vocabulary: ``rows(vocab, tp_size)``: the rows that every rank stores, padding included. None: as the family.
        stages: how layers are dealt to pipeline stages.
        local_layers: whether layers are numbered from 0 in every stage.
        local_experts: whether experts are numbered from 0 in every group of experts.
        tied: the names under which a head that is the embedding is stored where one stage has both.
        tied_last: that of the last stage where the embedding is on another; "" if it has none.
        uneven: whether ranks may be unequal.
        kv_shared: whether several ranks may hold the same KV head.
        ep_inside: whether experts are dealt to the tensor-parallel ranks.
        whole_experts: whether they always are, whatever degree is asked for; needs ``ep_inside``.
        most: the largest ``(pp, ep)`` that the layout has, None: any.
        drop: ``drop(part)``: why the engine does without a part, "" if it does not.
        rename: stretches of the checkpoint's names and what stands for them in ``{own}`` and the paths;
            with ``^`` before it only at the beginning of a name.
        container: the format of the files.
        part_bytes: the largest size of a file where the user names none; 0: one file a rank.
        metadata: of safetensors files.
        within: in files of torch.save the key under which the tensors are; "": nothing is around them.
        around: what else is saved there by a rank, by key.
        chunked: whether tensors are chunks of the checkpoint's own, whatever heads and fusions are in them: see
            :mod:`.chunked`. ``entries`` then only say how matrices of single experts are stacked.
        described: what else the metadata of a safetensors file says, by where each of its tensors begins in the
            whole one; only of a chunked table.
        sides: small files that the engine needs and the checkpoint has not, by name.
        left_out: names of side files of the checkpoint that the engine's directory must not have.
        sorted_names: whether tensors lie in the order of their names.
        flips: whether what is stored input x output may stay so.
    """

    entries: Sequence[Entry]
    file_name: FileName
    vocabulary: Callable[[int, int], int] | None = None
    stages: StageRule = equal_stages
    local_layers: bool = False
    local_experts: bool = False
    tied: tuple[str, ...] = ("head",)
    tied_last: str = "head"
    uneven: bool = False
    kv_shared: bool = True
    ep_inside: bool = True
    whole_experts: bool = False
    most: tuple[int | None, int | None] = (None, None)
    drop: Callable[[Part], str] = field(default=lambda part: "")
    rename: Sequence[tuple[str, str]] = ()
    container: str = SAFETENSORS
    part_bytes: int = 0
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    within: str = ""
    around: Callable[[Grid, Rank], Mapping[str, object]] | None = None
    chunked: bool = False
    described: Describer | None = None
    sides: SideWriter = field(default=lambda model, grid: {})
    left_out: Sequence[str] = ()
    sorted_names: bool = True
    flips: bool = False

    def renamed(self, name: str) -> str:
        """A name of the checkpoint with what the engine calls otherwise replaced, once each."""
        for old, new in self.rename:
            if not old.startswith("^"):
                name = name.replace(old, new, 1)
            elif name.startswith(old[1:]):
                name = new + name[len(old) - 1 :]
        return name


