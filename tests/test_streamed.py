"""Streamed matrices, banks of experts and comparisons by rows, held against the same thing done in one piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tpshard.axes import Heads, Padded, Units, replicated  # noqa: E402
from tpshard.header import build_header  # noqa: E402
from tpshard.layout import cut_dims  # noqa: E402
from tpshard.numerics.bank import Bank, ExpertMatrix  # noqa: E402
from tpshard.numerics.coverage import Coverage  # noqa: E402
from tpshard.numerics.rows import compare_rows  # noqa: E402
from tpshard.numerics.stores import Part, Store  # noqa: E402
from tpshard.numerics.streamed import StreamedMatrix, product  # noqa: E402

HEADS = Heads("heads", 6, 2)
ROWS = {
    "heads": HEADS.query(2),
    "fused": HEADS.query(2) + HEADS.kv(2) + HEADS.kv(2),
    "grouped": HEADS.grouped(2, 2, 2),
    "padded": Padded("vocab", 11).each(),
    "pairs": Units("ffn", 9).each() * 2,
    "whole": replicated(7),
}
NAMES = {"BF16": torch.bfloat16, "F32": torch.float32}


def stores(
    directory: Path, full: Any, dims: Any, tp_size: int, dtype: str
) -> tuple[Store, Part, list[tuple[Store, Part]]]:
    """The tensor whole, and cut over the ranks, in files."""

    def write(path: Path, value: Any) -> None:
        header = build_header([("w", dtype, tuple(value.shape))], {"format": "pt"})
        path.write_bytes(header + value.contiguous().view(torch.uint8).numpy().tobytes())

    def part(path: Path, cut: Any, rank: int) -> Part:
        offset = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert json.loads(path.read_bytes()[8:offset])
        return Part("w", dtype, 0, offset, cut, rank)

    cut, whole = cut_dims(dims, tp_size), cut_dims(tuple(replicated(n) for n in full.shape), 1)
    write(directory / "full", full)
    ranks = []
    for rank in range(tp_size):
        local = full
        for dim, partition in enumerate(cut.dims):
            pieces = [
                local.narrow(dim, start, length)
                if start >= 0
                else torch.zeros(*local.shape[:dim], length, *local.shape[dim + 1 :], dtype=local.dtype)
                for start, length in partition.ranks[rank]
            ]
            local = torch.cat(pieces, dim)
        path = directory / f"rank{rank}"
        write(path, local)
        ranks.append((Store([path], {}), part(path, cut, rank)))
    return Store([directory / "full"], {}), part(directory / "full", whole, 0), ranks


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from(sorted(ROWS)),
    columns=st.sampled_from(["heads", "whole"]),
    transposed=st.booleans(),
    tp_size=st.integers(1, 4),
    dtype=st.sampled_from(sorted(NAMES)),
    tile=st.sampled_from([1, 50, 1 << 20]),
)
def test_the_ranks_products_add_up(
    tmp_path_factory: Any, rows: str, columns: str, transposed: bool, tp_size: int, dtype: str, tile: int
) -> None:
    """A matrix cut along its outputs, or along its inputs: the ranks' outputs sum to those of the whole."""
    if rows != "whole" and columns != "whole":
        columns = "whole"
    out, into = ROWS[rows], ROWS[columns]
    dims = (into, out) if transposed and rows != "padded" else (out, into)
    transposed = dims[0] is into
    full = torch.randn(dims[0].extent, dims[1].extent).to(NAMES[dtype])
    source, whole, ranks = stores(tmp_path_factory.mktemp("w"), full, dims, tp_size, dtype)
    x = torch.randn(3, 2, into.extent, dtype=torch.float64)

    def run(store: Store, part: Part) -> Any:
        matrix = StreamedMatrix(store, part, tuple(full.shape), torch.float64, tile, "w", transposed)
        return matrix.apply(x)

    expected = x @ (full.double() if transposed else full.double().T)
    assert torch.allclose(run(source, whole), expected, atol=1e-12)
    total = sum(run(store, part) for store, part in ranks)
    copies = tp_size if rows == columns == "whole" else 1
    if copies > 1:
        total = total / copies
    held = torch.zeros(out.extent)
    for _, part in ranks:
        for start, length in part.runs(1 if transposed else 0):
            if start >= 0:
                held[start : start + length] += 1
    if columns == "whole" and rows != "whole":
        total = total / held.double()  # KV heads that several ranks hold come several times
    assert torch.allclose(total, expected, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_and_coverage_of_a_streamed_matrix(transposed: bool, tmp_path: Path) -> None:
    full = torch.randn(6, 9)
    store, part, _ranks = stores(tmp_path, full, (replicated(6), replicated(9)), 1, "F32")
    inputs = 6 if transposed else 9
    x = torch.randn(4, inputs, dtype=torch.float64)
    x[:, 2] = 0  # one input that no token uses: its elements are not reached
    x.requires_grad_()
    coverage = Coverage({"w": full.numel()})
    matrix = StreamedMatrix(store, part, (6, 9), torch.float64, 100, "w", transposed)
    g = torch.randn(4, 9 if transposed else 6, dtype=torch.float64)
    product(x, matrix, coverage).backward(g)
    assert torch.allclose(x.grad, g @ (full.double().T if transposed else full.double()))
    assert coverage.unreached() == {"w": 9 if transposed else 6}


@pytest.mark.parametrize("way", ["linear", "matmul", "operator", "stacked", "method"])
def test_a_bank_of_experts_is_what_it_stands_for(way: str) -> None:
    experts = torch.randn(3, 5, 4, dtype=torch.float64)
    made: list[int] = []

    def make(index: int) -> Any:
        made.append(index)
        return experts[index].clone()

    coverage = Coverage({"w": experts.numel()})
    coverage.divide("w", 3)
    bank = Bank("w", experts, make, lambda: torch.stack([make(n) for n in range(3)]), coverage)
    index = torch.tensor(1)
    x = torch.randn(2, 4 if way in ("linear", "stacked") else 5, dtype=torch.float64, requires_grad=True)
    expected: Any
    found: Any
    if way == "linear":
        found, expected = torch.nn.functional.linear(x, bank[index]), x @ experts[1].T
    elif way == "matmul":
        found, expected = torch.matmul(x, bank[index]), x @ experts[1]
    elif way == "operator":
        found, expected = x @ bank[index], x @ experts[1]
    elif way == "stacked":
        found, expected = torch.einsum("ti,eoi->teo", x, bank), torch.einsum("ti,eoi->teo", x, experts)
    else:
        found, expected = x @ bank[index].to(torch.float64), x @ experts[1]
    assert torch.allclose(found, expected)
    assert (made == [1]) == (way != "stacked")  # one expert at a time
    found.sum().backward()
    if way in ("linear", "matmul", "operator"):
        assert isinstance(bank[1], ExpertMatrix)
        assert set(coverage.unreached()) == {"w[0]", "w[2]"}


@settings(max_examples=40, deadline=None)
@given(rows=st.sampled_from(sorted(ROWS)), tp_size=st.integers(1, 4), data=st.data())
def test_a_changed_value_is_found_in_its_row(tmp_path_factory: Any, rows: str, tp_size: int, data: Any) -> None:
    dims = (ROWS[rows], replicated(3))
    full = torch.randn(dims[0].extent, 3)
    full[0, 0] = float("nan")  # equal bits are equal, whatever they mean
    directory = tmp_path_factory.mktemp("w")
    source, whole, ranks = stores(directory, full, dims, tp_size, "F32")
    assert all(compare_rows(source, whole, store, part) is None for store, part in ranks)
    rank = data.draw(st.integers(0, tp_size - 1))
    part = ranks[rank][1]
    if not part.shape[0]:
        return
    row = data.draw(st.integers(0, part.shape[0] - 1))
    path = directory / f"rank{rank}"
    raw = bytearray(path.read_bytes())
    raw[part.offset + 12 * row + 4 + data.draw(st.integers(0, 3))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    found = compare_rows(source, whole, Store([path], {}), part)
    assert found is not None
    assert found.rows == 1
    expected = [start + n if start >= 0 else -1 for start, length in part.runs(0) for n in range(length)][row]
    assert found.row == expected
