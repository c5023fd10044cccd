"""How a part lies over the ranks: one cut, or several pieces, by the form that an engine's table names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpshard.axes import Axis, Dim, Heads, Padded, Segment
from tpshard.errors import UnsupportedError, short
from tpshard.intervals import Run, Runs, joined, total, whole
from tpshard.layout import Cut, Piece, cut
from tpshard.partition import Partition, interned, partition

from .enginetable import ALONG_OTHER, CUT, GROUPED, PLAIN, ROTARY, WHOLE, EngineTable
from .grid import Grid, Rank
from .parts import Part


class Forms:
    """Makes pieces for one engine and grid. What is alike over layers is made once."""

    def __init__(self, table: EngineTable, grid: Grid, experts: int) -> None:
        self._table, self._grid = table, grid
        self._experts = grid.experts(experts) if experts else ()
        self._holders: dict[int, int] = {}
        self._known: dict[tuple[object, ...], tuple[Partition, ...]] = {}

    def pieces(self, form: str, parts: Sequence[Part], stages: Iterable[int]) -> list[Piece]:
        """The pieces of parts that are laid one after the other; only the ranks of ``stages`` hold them.

        Raises:
            UnsupportedError: the form is not for such parts.
        """
        held = tuple(stages)
        if form == PLAIN:  # a fusion of the checkpoint stays as it is
            parts = list({part.tensor.name: part._replace(strand=None) for part in parts}.values())
        if form == GROUPED:
            return self._grouped(parts, held)
        return [Piece(part.tensor.name, self._cut(form, part, held)) for part in parts]

    # -- one cut ----------------------------------------------------------------------------------

    def _cut(self, form: str, part: Part, stages: tuple[int, ...]) -> Cut:
        key = (form, id(part.dims), part.strand, part.at, part.bank, self._alike(part), stages)
        if key not in self._known:
            self._known[key] = self._partitions(form, part, stages)
        return cut(self._known[key], len(self._grid.ranks))

    def _alike(self, part: Part) -> object:
        """What of a part's expert its cut depends on: the expert in a bank, else the first rank that holds it."""
        if part.bank or part.expert is None or not self._experts:
            return part.expert
        if part.expert not in self._holders:
            starts = (n for n, (start, stop) in enumerate(self._experts) if start <= part.expert < stop)
            self._holders[part.expert] = next(starts, -1)
        return self._holders[part.expert]

    def _partitions(self, form: str, part: Part, stages: tuple[int, ...]) -> tuple[Partition, ...]:
        ranks = self._grid.ranks
        rows: list[list[Runs]] = []
        first = next((d for d, dim in enumerate(part.dims) if dim.axes), None)
        for d, dim in enumerate(part.dims):
            if d == 0 and part.bank:
                rows.append([self._of_bank(part, rank, number) for number, rank in enumerate(ranks)])
                continue
            strand = part.strand if d == part.at else None
            if form == WHOLE or (part.is_expert and not self._grid.cuts_experts):
                rows.append([strand.all if strand else whole(dim.extent)] * len(ranks))
            elif form == PLAIN:
                rows.append([_chunk(dim.extent, rank.tp, self._grid.tp_size, d == first) for rank in ranks])
            elif form == ALONG_OTHER:
                rows.append([_chunk(dim.extent, rank.tp, self._grid.tp_size, not dim.axes) for rank in ranks])
            elif form in (CUT, ROTARY):
                of_tp = self._of_strand(part) if strand else partition(self.on_engine(dim), self._grid.tp_size).ranks
                if form == ROTARY and d == 0:
                    of_tp = tuple(_paired(runs, _head_size(part, dim)) for runs in of_tp)
                rows.append([of_tp[rank.tp] for rank in ranks])
            else:
                raise UnsupportedError(f"{short(part.tensor.name)}: there is no form {form!r}")
        if rows:
            rows[0] = [
                runs if self._holds(part, rank, number, stages) else ()
                for number, (runs, rank) in enumerate(zip(rows[0], ranks, strict=True))
            ]
        return tuple(interned(dim.extent, tuple(of_dim)) for dim, of_dim in zip(part.dims, rows, strict=True))

    def _holds(self, part: Part, rank: Rank, number: int, stages: tuple[int, ...]) -> bool:
        if rank.pp not in stages:
            return False
        if part.expert is None or not self._experts:
            return True
        start, stop = self._experts[number]
        return start <= part.expert < stop

    def _of_bank(self, part: Part, rank: Rank, number: int) -> Runs:
        if part.expert is not None:
            return (Run(part.expert, 1),)
        start, stop = self._experts[number] if self._experts else (0, part.dims[0].extent)
        return whole(stop - start) and (Run(start, stop - start),)

    def _of_strand(self, part: Part) -> tuple[Runs, ...]:
        strand = part.strand
        assert strand is not None
        if strand.axis is None:
            return (strand.all,) * self._grid.tp_size
        return tuple(strand.runs(*bounds) for bounds in strand.axis.bounds(strand.view, self._grid.tp_size))

    def on_engine(self, dim: Dim) -> Dim:
        """The dimension with the engine's rule for the rows of the vocabulary."""
        if self._table.vocabulary is None or not any(isinstance(axis, Padded) for axis in dim.axes):
            return dim
        return Dim(tuple([_rows(segment, self._table, self._grid.tp_size) for segment in dim.segments]))

    # -- Megatron's order -------------------------------------------------------------------------

    def _grouped(self, parts: Sequence[Part], stages: tuple[int, ...]) -> list[Piece]:
        """Queries, key and value of every KV group, one group after the other, in equal parts of all rows."""
        runs = [_by_group(part) for part in parts]
        sequence = [
            (part, of_part[group])
            for group in range(len(runs[0])) for part, of_part in zip(parts, runs, strict=True)
        ]  # fmt: skip
        rows = sum(total(found) for _, found in sequence)
        ranks = self._grid.ranks
        if rows % self._grid.tp_size:
            raise UnsupportedError(
                f"{short(parts[0].tensor.name)}: {rows} rows of queries, keys and values are not {self._grid.tp_size} "
                "equal parts; choose a degree that divides the query heads"
            )
        each = rows // self._grid.tp_size
        pieces, at = [], 0
        for part, found in sequence:
            held = []
            for rank in ranks:
                low, high = rank.tp * each - at, (rank.tp + 1) * each - at
                held.append(_sliced(found, low, high) if rank.pp in stages else ())
            at += total(found)
            dims = [interned(part.dims[0].extent, tuple(held))]
            dims += [interned(dim.extent, (whole(dim.extent),) * len(ranks)) for dim in part.dims[1:]]
            pieces.append(Piece(part.tensor.name, cut(tuple(dims), len(ranks))))
        return pieces


def heads_of(part: Part) -> Heads | None:
    """The heads along which a part is cut in its first dimension."""
    axes: Sequence[Axis] = part.dims[0].axes
    return next((axis for axis in axes if isinstance(axis, Heads)), None)


def _by_group(part: Part) -> list[Runs]:
    """The rows of a part that belong to each KV group."""
    from .strands import strands_of

    heads = heads_of(part)
    strand = part.strand or (strands_of(part.dims[0])[0] if len(strands_of(part.dims[0])) == 1 else None)
    if heads is None or strand is None or strand.axis is None or part.at != 0:
        raise UnsupportedError(
            f"{short(part.tensor.name)} is not cut by query and KV heads, so it cannot be laid group by group"
        )
    each = heads.group if strand.view == "query" else 1
    return [strand.runs(group * each, (group + 1) * each) for group in range(heads.kv_heads)]


def _head_size(part: Part, dim: Dim) -> int:
    sizes = {segment.size for segment in dim.segments}
    if len(sizes) != 1 or (size := sizes.pop()) % 2 or heads_of(part) is None:
        raise UnsupportedError(f"{short(part.tensor.name)} has no heads of one even size, so its rows cannot be paired")
    return size


def _paired(runs: Runs, size: int) -> Runs:
    """The rows of whole heads, every head's halves interleaved."""
    out: list[Run] = []
    for run in runs:
        for head in range(run.start, run.start + run.length, size):
            for row in range(size // 2):
                out += [Run(head + row, 1), Run(head + size // 2 + row, 1)]
    return joined(out)


def _chunk(extent: int, tp_rank: int, tp_size: int, cuts: bool) -> Runs:
    """The rank's chunk as ``torch.chunk`` makes them: the first ones are the largest."""
    if not cuts:
        return whole(extent)
    each = -(-extent // tp_size)
    start, stop = min(tp_rank * each, extent), min((tp_rank + 1) * each, extent)
    return whole(stop - start) and (Run(start, stop - start),)


def _sliced(runs: Runs, low: int, high: int) -> Runs:
    """What is stored at the positions ``[low, high)`` of a sequence of runs."""
    out, at = [], 0
    for run in runs:
        start, stop = max(low - at, 0), min(high - at, run.length)
        if stop > start:
            out.append(Run(run.start + start, stop - start))
        at += run.length
    return joined(out)


def _rows(segment: Segment, table: EngineTable, tp_size: int) -> Segment:
    axis = segment.axis
    if not isinstance(axis, Padded) or table.vocabulary is None:
        return segment
    return segment._replace(axis=Padded(axis.name, axis.count, table.vocabulary(axis.count, tp_size), axis.noun))
