"""A quantised checkpoint, or shards of one, as the matrices that its tensors stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .axes import Axis, Dim
from .manifest import Note
from .matching import Logical, Matched, match
from .planning import Placed
from .quantisation import formats_of
from .quantisation.composition import unpack
from .quantisation.methods import quantisation_of
from .quantisation.unpacking import Packed
from .registry import table_for

if TYPE_CHECKING:
    from .quantisation.values import Matrix

DTYPE = "F32"  # in which values are computed


@dataclass(frozen=True)
class Quantised:
    """What the tensors of a quantised checkpoint stand for.

    Args:
        tensors: its logical tensors: every matrix in place of what stands for it, in F32, and the others.
        dims: the dimensions of the matrices, along the axes of the layout in question.
        notes: role and treatment of the matrices.
        packed: what stands for each matrix, by its name.
        matched: all of ``tensors`` held against the table, along the table's own axes.
        quantisation: the ``quantization_config``.
    """

    tensors: tuple[Logical, ...]
    dims: Mapping[str, tuple[Dim, ...]]
    notes: Mapping[str, Note]
    packed: Mapping[str, Packed]
    matched: Matched
    quantisation: Mapping[str, Any]

    def matrices(self, placed: Placed, rank: int) -> dict[str, Matrix]:
        """What a rank of a layout stores of every matrix, by name; those of which it stores nothing are left out.

        Raises:
            UnsupportedError: no formula is known for the format of one.
            DamagedError: the rank's tensors are not of one part of a matrix.
        """
        from .quantisation.valuereader import cuts_of, matrix_of

        cuts = cuts_of(placed)
        found = {}
        for name, packed in self.packed.items():
            rule, dims = self.matched.rules.get(name), self.dims[name]
            matrix = matrix_of(packed, rule, dims, cuts, rank, self.quantisation)
            if matrix is not None:
                found[name] = matrix
        return found


def quantised(
    config: Mapping[str, Any],
    tensors: Sequence[Logical],
    *,
    aliases: Mapping[str, str] | None = None,
    axes: Iterable[Axis] = (),
    copy_unknown: bool = False,
) -> Quantised | None:
    """The matrices of a checkpoint with this ``config.json`` and these tensors; None where nothing is quantised.

    Args:
        aliases: other names of the tensors, with the one under which they are stored.
        axes: axes of the layout in question, which take the places of the table's of the same names.

    Raises:
        UnsupportedError, DamagedError: as :func:`tpshard.checkpoint.open_checkpoint`.
    """
    quantisation = quantisation_of(config)
    if quantisation is None:
        return None
    table = table_for(config)
    by_name = {tensor.name: tensor for tensor in tensors}
    others = [by_name[target]._replace(name=alias) for alias, target in (aliases or {}).items() if target in by_name]
    unpacked = unpack([*tensors, *others], formats_of(config), table)
    if not unpacked.packed:
        return None
    matched = match(table, unpacked.tensors, copy_unknown=copy_unknown)
    by_axis = {axis.name: axis for axis in axes}
    found = [
        tensor._replace(dtype=DTYPE) if tensor.name in unpacked.packed else tensor
        for tensor in unpacked.tensors
        if tensor.name in unpacked.packed or tensor.name in by_name
    ]
    rules = matched.rules
    unknown = Note("unknown")
    return Quantised(
        tuple(found),
        {name: tuple(_along(dim, by_axis) for dim in matched.dims[name]) for name in unpacked.packed},
        {n: Note(rules[n].role, rules[n].note) if n in rules else unknown for n in unpacked.packed},
        unpacked.packed,
        matched,
        quantisation,
    )


def values_at(config: Mapping[str, Any]) -> str:
    """What to do where groups forbid a degree; nothing where no formula is known of the values."""
    quantisation = quantisation_of(config)
    if quantisation is None:
        return ""
    from .quantisation.methods import method_of
    from .quantisation.valueformulas import DEQUANTISED

    if method_of(quantisation).lower() not in DEQUANTISED:
        return ""
    return "--dequantize bf16 cuts the values of the quantised matrices, which no group keeps together"


def is_forbidden_by_groups(reason: str, axes: Mapping[Axis, str]) -> bool:
    """Whether a refusal of a degree names a tensor whose groups stay whole, and not only an axis."""
    return any(text.endswith(")") and text in reason for text in axes.values())


def _along(dim: Dim, axes: Mapping[str, Axis]) -> Dim:
    """The dimension along the axes of the same names."""
    return Dim(tuple([s if s.axis is None else s._replace(axis=axes.get(s.axis.name, s.axis)) for s in dim.segments]))
