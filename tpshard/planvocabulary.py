"""Rules for the vocabulary: its tables, the heads that score it, and their biases.

Every rule gives ``(member, message)`` pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .axes import Axis
from .intervals import PAD
from .plancuts import tiling_fault, unit_noun
from .planparts import Member, Said


def judge_vocabulary(members: Sequence[Member], tp_size: int, others: Iterable[object] = ()) -> Iterator[Said]:
    """Embedding, head and head bias: consecutive tiles in rank order, equally long with padding.

    They are alike for all of one axis; a model may have several vocabularies (words, entities, glyphs), of which a
    head scores the one that an embedding of as many rows looks up.

    Args:
        others: the axes of what is no vocabulary.
    """
    yield from _one_axis(members, frozenset(others))
    firsts: dict[Axis, Member] = {}
    for member in members:
        if member.main is None:
            if tp_size > 1:
                summed = "the sum over ranks" if "embed" in member.role else "the gathered logits"
                yield member, f"{member.name} is whole on every rank: {summed} would hold every row {tp_size} times"
            continue
        axis = member.main.axes[0]
        if len(member.main.held) != 1:
            yield member, f"{member.name} is not cut along one vocabulary"
            continue
        ((stream, held),) = member.main.held.items()
        fault = tiling_fault(held, axis.views()[stream.view])
        if fault:
            yield member, f"{member.name}: of the {unit_noun(axis, stream.view)}, {fault}"
        starts = [spans[0][0] for spans in held if spans]
        if any(len(spans) > 1 for spans in held) or starts != sorted(starts):
            yield member, f"{member.name}: a rank's rows are not one consecutive range, in rank order"
        size = member.main.sizes[stream]
        pads = member.main.padding
        lengths = [sum(b - a for a, b in spans) * size + pad for spans, pad in zip(held, pads, strict=True)]
        padded = any(run.start == PAD for part in member.tensor.parts for runs in part.ranks for run in runs)
        if padded and len(set(lengths)) > 1:
            rows = sorted(set(lengths))
            yield member, f"{member.name}: with padding the ranks hold {rows} rows, and should hold the same"
        first = firsts.setdefault(axis, member)
        if first is member:
            continue
        if first.main is not None and next(iter(first.main.held.values())) != held:
            yield member, f"{member.name} has other rows on the ranks than {first.name}"
        elif first.main is not None and first.main.padding != member.main.padding:
            yield member, f"{member.name} is padded otherwise than {first.name}"


def _one_axis(members: Sequence[Member], others: frozenset[object]) -> Iterator[Said]:
    """A head lies along the axis of the embedding of its ids, and no table along one of the layers' axes."""
    tables = [(m, m.main.axes[0], m.tensor.shape[0]) for m in members if m.main and "embed" in m.role]
    for member in members:
        if member.main is None:
            continue
        axis = member.main.axes[0]
        if axis in others:
            yield member, f"{member.name} is cut along {axis.describe()}, which is an axis of layers and no vocabulary"
        elif "head" in member.role and all(axis != of_table for _, of_table, _ in tables):
            for table, of_table, rows in tables:
                if rows == member.tensor.shape[0]:
                    yield member, (
                        f"{member.name} is cut along {axis.describe()} ('{axis.name}'), and {table.name}, of as many "
                        f"rows, along {of_table.describe()} ('{of_table.name}')"
                    )
                    break
