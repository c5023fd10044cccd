"""A LoRA adapter held against its base model: every pair of matrices is cut as the matrix that it adapts.

Where the base is column-parallel, A is whole on every rank and B is cut along its outputs, with the base's
units. Where it is row-parallel, A is cut along its inputs and B is whole: every rank adds ``B (A x)`` of its own
inputs to its part of the sum, and since B is linear the base's sum over ranks sums these too. An embedding is
the second case, its inputs being the vocabulary. DoRA (arXiv 2402.09353) divides by the norm of every row of the
adapted matrix: where the row is cut, the squares of the ranks are summed before the root.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .adapterbase import Base, Target, open_base
from .axes import Dim, replicated
from .checkpoint import Checkpoint, aliased, open_checkpoint, place_source, require_alike
from .degrees import axes_of
from .errors import DamagedError, UnsupportedError, short
from .lora import LoraConfig, Piece, lora_config, piece_of
from .matching import Logical, Matched, listed
from .roles import ROW
from .source import open_source
from .table import ADDED_ONCE, NEEDS_SUM, Rule

PARTIAL = "row-parallel: a rank's B (A x) is a part of its base matrix's sum over ranks"
TOKENS = "whole: rows of single tokens, of which a rank takes those of its part of the vocabulary"


def open_given(
    path: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None, copy_unknown: bool = False
) -> Checkpoint:
    """Open a checkpoint, or, where its ``base`` model is named, the adapter in ``path``; raises as either does."""
    if base is None:
        return open_checkpoint(path, copy_unknown=copy_unknown)
    return open_adapter(path, base, copy_unknown=copy_unknown)


def open_adapter(
    path: str | os.PathLike[str], base: str | os.PathLike[str], *, copy_unknown: bool = False
) -> Checkpoint:
    """Open a PEFT adapter and match all its tensors against the model ``base`` (a checkpoint, shards, or a config).

    Raises:
        UsageError: there is no adapter, or no base.
        UnsupportedError: an adapter that is not LoRA, or a tensor that adapts nothing of the base (unless
            ``copy_unknown``).
        DamagedError: a shape does not fit the base, the rank is another than the config's, half a pair is missing.
        StorageError: reading failed.
    """
    source = open_source(path, adapter=True)
    config = lora_config(source.config)
    model = open_base(base)
    placed = place_source(source)
    tensors = tuple(placed.layout.tensors.values())
    matched = _Adapter(model, config).match([*tensors, *aliased(source, placed.layout)], copy_unknown=copy_unknown)
    require_alike(source, matched)
    family = f"{model.family} adapter"
    axes = axes_of({**matched.dims, **model.stored})  # a degree that the base cannot take is of no use
    return Checkpoint(source, family, tensors, matched, axes, placed, source.warnings)


class _Way(NamedTuple):
    """A way to read a pair: what it adapts, the dimensions of that by number, and how many experts lie side by side."""

    target: Target
    out: int
    into: int
    experts: int

    def length(self, number: int) -> int | None:
        dim = self.target.dims[number]
        return None if dim is None else dim.extent


@dataclass
class _Adapter:
    """The tensors of one adapter on their way to rules of their own."""

    base: Base
    config: LoraConfig
    rules: dict[str, Rule] = field(default_factory=dict)
    dims: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    _same: dict[tuple[Dim, ...], tuple[Dim, ...]] = field(default_factory=dict)  # one tuple for all that are cut alike
    _rules: dict[tuple[int, str, str], Rule] = field(default_factory=dict)

    def match(self, tensors: Sequence[Logical], *, copy_unknown: bool) -> Matched:
        pieces = {tensor.name: piece_of(tensor.name) for tensor in tensors}
        targets = self.base.targets(name for piece in pieces.values() for name in self._candidates(piece))
        pairs: dict[str, list[tuple[Piece, Logical]]] = {}
        for tensor in tensors:
            piece = pieces[tensor.name]
            if not any(name in targets for name in self._candidates(piece)):
                self._copy_whole(tensor)
            elif piece.kind == "copy":
                self._copy(tensor, targets[piece.base])
            elif piece.kind == "tokens":
                self._tokens(tensor, targets[f"{piece.base}.weight"])
            else:
                pairs.setdefault(piece.pair, []).append((piece, tensor))
        for members in pairs.values():
            self._pair(members, targets)
        if self.unknown and not copy_unknown:
            raise UnsupportedError(
                f"{listed(self.unknown)}: nothing of the base model {self.base.label} is adapted by that; name the "
                f"base that the adapter was made for{self._hint()}, or use --copy-unknown to keep such tensors whole "
                "on every rank"
            )
        return Matched(self.rules, self.dims, {}, tuple(self.unknown))

    def _hint(self) -> str:
        return f" ({self.config.base!r:.200} by its config)" if self.config.base else ""

    def _candidates(self, piece: Piece) -> Iterator[str]:
        """The tensors of the base that a piece may belong to."""
        if piece.kind == "copy":
            yield piece.base
        elif piece.kind:
            yield f"{piece.base}.weight"
            for parameter in self.config.parameters if piece.kind != "tokens" else ():
                name = f"{piece.base}.{parameter.rpartition('.')[2]}"
                if name == parameter or name.endswith(f".{parameter}"):
                    yield name

    # -- single tensors ---------------------------------------------------------------------------

    def _add(self, tensor: Logical, dims: Iterable[Dim | None], role: str, note: str = "") -> None:
        known = tuple(replicated(n) if dim is None else dim for n, dim in zip(tensor.shape, dims, strict=True))
        known = self.dims[tensor.name] = self._same.setdefault(known, known)
        key = id(known), role, note
        if key not in self._rules:
            self._rules[key] = Rule(name="", dims=known, role=role, optional=False, block="", note=note)
        self.rules[tensor.name] = self._rules[key]

    def _copy_whole(self, tensor: Logical) -> None:
        self.unknown.append(tensor.name)
        self.dims[tensor.name] = tuple(map(replicated, tensor.shape))

    def _copy(self, tensor: Logical, target: Target) -> None:
        """A whole copy of a tensor of the base, cut as that is."""
        lengths = [None if dim is None else dim.extent for dim in target.dims]
        if len(lengths) != len(tensor.shape) or any(
            implied not in (None, length) for implied, length in zip(lengths, tensor.shape, strict=True)
        ):
            raise self._wrong(tensor, target, f"is stored as {list(tensor.shape)}")
        self._add(tensor, target.dims, target.role, target.note)

    def _tokens(self, tensor: Logical, target: Target) -> None:
        width = target.dims[-1]
        if len(tensor.shape) != 2 or (width is not None and width.extent != tensor.shape[1]):
            raise self._wrong(tensor, target, f"is stored as {list(tensor.shape)}")
        self._add(tensor, (None, width), f"{target.role}_tokens", TOKENS)

    def _wrong(self, tensor: Logical, target: Target, what: str) -> DamagedError:
        return DamagedError(
            f"{short(tensor.name)} {what}, and {short(target.name)} of the base model {self.base.label} has the shape "
            f"{target.shape}: the adapter is of another base{self._hint()}; name that, or resize the base first if "
            "its vocabulary was resized"
        )

    # -- pairs ------------------------------------------------------------------------------------

    def _pair(self, members: Sequence[tuple[Piece, Logical]], targets: Mapping[str, Target]) -> None:
        found: dict[str, Logical] = {}
        for piece, tensor in members:
            twin = found.setdefault(piece.kind, tensor)
            if twin is not tensor:
                raise DamagedError(
                    f"{short(twin.name)} and {short(tensor.name)} are two names of one tensor; remove one of them from "
                    "the adapter"
                )
        piece, some = members[0]
        for kind, other in (("A", "B"), ("B", "A")):
            if kind not in found:
                raise DamagedError(
                    f"{short(some.name)} lacks its lora_{kind}"
                    + (f", and {short(found[other].name)} is there" if other in found else "")
                    + "; download or copy the adapter again"
                )
        first, second = found["A"], found["B"]
        for tensor in (first, second):
            if len(tensor.shape) != 2:
                raise UnsupportedError(
                    f"{short(tensor.name)} has {len(tensor.shape)} dimensions {list(tensor.shape)}: an adapter of a "
                    "convolution is not cut; merge it into the base model (peft's merge_and_unload) and split that"
                )
        if first.shape[0] != second.shape[1]:
            raise DamagedError(
                f"{short(first.name)} has rank {first.shape[0]:,} (shape {list(first.shape)}) and "
                f"{short(second.name)} rank {second.shape[1]:,} (shape {list(second.shape)}); "
                "download or copy the adapter again"
            )
        way = self._way(first, second, any(p.embedding for p, _ in members), self._of(piece, targets))
        self._require_rank(first, way)
        self._cut(found, way)

    def _of(self, piece: Piece, targets: Mapping[str, Target]) -> list[Target]:
        return [targets[name] for name in self._candidates(piece) if name in targets]

    def _way(self, first: Logical, second: Logical, embedding: bool, targets: Sequence[Target]) -> _Way:
        """The one way in which the shapes fit what may be adapted."""
        fits: dict[tuple[Dim | None, Dim | None], _Way] = {}
        for target in targets:
            for way in _ways(target, embedding):
                if way.length(way.into) in (None, first.shape[1]) and way.length(way.out) in (None, second.shape[0]):
                    fits.setdefault((target.dims[way.out], target.dims[way.into]), way)
        if not fits:
            what = f"takes {first.shape[1]:,} inputs and {short(second.name)} makes {second.shape[0]:,} outputs"
            raise self._wrong(first, targets[0], what)
        if len(fits) > 1:
            names = " and ".join(dict.fromkeys(short(way.target.name) for way in fits.values()))
            raise UnsupportedError(
                f"{short(first.name)} fits more than one way ({names}, {fits.popitem()[1].target.shape}), and its "
                "shape does not tell which; merge the adapter into the base model and split that"
            )
        return next(iter(fits.values()))

    def _require_rank(self, first: Logical, way: _Way) -> None:
        rank, rest = divmod(first.shape[0], way.experts)
        if rest or rank not in self.config.ranks:
            each = f" for {way.experts:,} experts" if way.experts > 1 else ""
            promised = " or ".join(map(str, sorted(self.config.ranks)))
            raise DamagedError(
                f"{short(first.name)} has {first.shape[0]:,} rows (shape {list(first.shape)}){each}, and "
                f"adapter_config.json has the rank {promised}; config and weights are not of one adapter: copy it again"
            )

    def _cut(self, found: Mapping[str, Logical], way: _Way) -> None:
        target = way.target
        out, into = target.dims[way.out], target.dims[way.into]
        summed = into is not None and bool(into.axes)
        along = out is not None and bool(out.axes)
        notes = {
            "A": PARTIAL if summed else "",
            "B": PARTIAL if summed else target.note if along else "",
            "bias": ADDED_ONCE if summed else "",
            "magnitude": NEEDS_SUM if summed else "",
        }
        for kind, tensor in found.items():
            dims = {"A": (None, into), "B": (out, None)}.get(kind, (out,))
            if len(dims) != len(tensor.shape) or (len(dims) == 1 and tensor.shape != found["B"].shape[:1]):
                raise self._wrong(tensor, target, f"is stored as {list(tensor.shape)}")
            self._add(tensor, dims, f"{target.role}_lora_{kind.lower()}", notes[kind])


def _ways(target: Target, embedding: bool) -> Iterator[_Way]:
    """How a pair can adapt a tensor: which of its last two dimensions are the outputs.

    Stored ``[out, in]`` or ``[in, out]``: a tensor that is cut tells by its role. A row-parallel one is cut along its
    inputs, any other along its outputs.
    """
    if len(target.dims) not in (2, 3):
        return
    bank = target.dims[0] if len(target.dims) == 3 else None
    if bank is not None and bank.axes:
        raise UnsupportedError(
            f"{short(target.name)} deals its experts to ranks, along which adapters are not cut; merge the adapter "
            "into the base model and split that"
        )
    experts = bank.extent if bank is not None else 1
    low, high = len(target.dims) - 2, len(target.dims) - 1
    if embedding:
        yield _Way(target, high, low, experts)
        return
    cut = [number for number in (low, high) if _is_cut(target.dims[number])]
    for out, into in ((low, high), (high, low)):
        if len(cut) != 1 or cut[0] == (into if target.role in ROW else out):
            yield _Way(target, out, into, experts)


def _is_cut(dim: Dim | None) -> bool:
    return dim is not None and bool(dim.axes)
