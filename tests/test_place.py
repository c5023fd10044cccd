"""Where tensors lie in files, and the headers that say so, read back by the product's own header reader."""

from __future__ import annotations

import kinds
import planned
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpshard.axes import replicated
from tpshard.errors import DamagedError, UnsupportedError
from tpshard.header import WeightsFile, read_header
from tpshard.layout import Layout, Piece, Stored, cut_dims, held_by, whole_layout
from tpshard.matching import Logical
from tpshard.place import (
    ALIGN,
    Headed,
    place_native,
    place_opened,
    place_repacked,
    rank_file_name,
    rank_metadata,
    sealed,
)
from tpshard.planning import Placed


def opened(headed: Headed) -> list[WeightsFile]:
    """The files as they would be read from the disk: their headers and as many bytes as they claim."""
    out = []
    for file, header in zip(headed.placed.files, headed.headers, strict=True):
        out.append(read_header(lambda at, n, h=header: h[at : at + n], file.size, file.name))  # type: ignore[misc]
    return out


def check(headed: Headed, align: int) -> None:
    placed = headed.placed
    files = opened(headed)
    seen = 0
    for n, (stored, row) in enumerate(zip(placed.layout.stored, placed.extents, strict=True)):
        assert len(row) == placed.layout.size
        for rank, extent in enumerate(row):
            shape = stored.shape(rank)
            assert (extent is None) == (shape is None), n
            if extent is None:
                continue
            seen += 1
            assert placed.files[extent.file].rank == rank
            info = next(i for i in files[extent.file].tensors if i.name == stored.name)
            assert (info.dtype, info.shape) == (stored.dtype, shape)
            assert (info.offset, info.nbytes) == (extent.offset, extent.nbytes)
            assert extent.tensor == stored.name
    assert seen == sum(len(file.tensors) for file in files)
    for file, header in zip(files, headed.headers, strict=True):
        assert len(header) % align == 0
        order = [stored.name for stored in placed.layout.stored]
        held = [info.name for info in file.tensors if info.nbytes]
        assert held == sorted(held, key=order.index), "in the layout's order"


@pytest.mark.parametrize("tp_size", range(1, 13))
def test_one_file_a_rank(tp_size: int) -> None:
    layout = planned.native(kinds.BYTES, tp_size)
    headed = place_native(layout)
    check(headed, ALIGN)
    assert [file.rank for file in headed.placed.files] == list(range(tp_size))
    assert [file.name for file in headed.placed.files] == [rank_file_name(rank, tp_size) for rank in range(tp_size)]
    for rank, file in enumerate(opened(headed)):
        assert file.metadata == rank_metadata(rank, tp_size, layout.digest, "-" * 64)
    content = "0123456789abcdef" * 4
    for rank, header in enumerate(headed.headers):
        whole = sealed(header, content)
        assert len(whole) == len(header)
        file = read_header(lambda at, n, h=whole: h[at : at + n], headed.placed.files[rank].size, "x")  # type: ignore[misc]
        assert file.metadata == rank_metadata(rank, tp_size, layout.digest, content)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 900))
def test_files_of_limited_size(tp_size: int, limit: int) -> None:
    layout = planned.native(kinds.BYTES, tp_size)
    headed = place_native(layout, limit)
    check(headed, ALIGN)
    parts: dict[int, list[str]] = {}
    for file, header in zip(headed.placed.files, headed.headers, strict=True):
        parts.setdefault(file.rank, []).append(file.name)
        held = [
            extent
            for row in headed.placed.extents
            for extent in row
            if extent and headed.placed.files[extent.file] == file
        ]
        assert file.size - len(header) <= limit or len([e for e in held if e.nbytes]) == 1
    for rank, names in parts.items():
        assert names == [rank_file_name(rank, tp_size, part, len(names)) for part in range(len(names))]


def test_names_of_files() -> None:
    assert rank_file_name(3, 8) == "model-tp-03-of-08.safetensors"
    assert rank_file_name(3, 8, 1, 2) == "model-tp-03-of-08-00002-of-00002.safetensors"
    assert rank_file_name(7, 1024) == "model-tp-0007-of-1024.safetensors"
    assert len({rank_file_name(rank, 1000) for rank in range(1000)}) == 1000


def sparse() -> Layout:
    """The second of three ranks holds nothing, the others not the same."""
    stored = tuple(
        Stored(name, "U8", (Piece(name, held_by(cut_dims((replicated(4),), 3), ranks)),))
        for name, ranks in (("a", [0]), ("b", [2]), ("c", [0, 2]))
    )
    return Layout(3, {s.name: Logical(s.name, "U8", (4,)) for s in stored}, stored)


def test_ranks_that_hold_little_or_nothing() -> None:
    headed = place_native(sparse())
    check(headed, ALIGN)
    assert [[info.name for info in file.tensors] for file in opened(headed)] == [["a", "c"], [], ["b", "c"]]
    assert len(headed.headers) == 3


@pytest.mark.parametrize("limit", [0, 1, 100, 10**9])
def test_repacked_files(limit: int) -> None:
    layout = whole_layout(planned.native(kinds.BYTES, 1).tensors.values())
    headed = place_repacked(layout, limit)
    check(headed, 8)
    names = [file.name for file in headed.placed.files]
    if limit in (0, 10**9):
        assert names == ["model.safetensors"]
    else:
        assert names == [f"model-{n + 1:05d}-of-{len(names):05d}.safetensors" for n in range(len(names))]
        assert len(names) > 5
    assert all(file.metadata == {"format": "pt"} for file in opened(headed))


@pytest.mark.parametrize("limit", [0, 200])
def test_opened_files_lie_where_they_were_placed(limit: int) -> None:
    for layout in (planned.native(kinds.BYTES, 5), sparse()):
        headed = place_native(layout, limit)
        files = [(file, placed.rank) for file, placed in zip(opened(headed), headed.placed.files, strict=True)]
        assert place_opened(layout, files) == headed.placed


def test_opened_files_of_another_split() -> None:
    tensors = {"a": kinds.CUT["column"], "b": kinds.CUT["norm"]}
    layout = planned.native(tensors, 2)
    first, second = opened(place_native(layout))

    def placed(*files: tuple[WeightsFile, int]) -> Placed:
        return place_opened(layout, files)

    assert placed((first, 0), (second, 1)).layout is layout
    with pytest.raises(DamagedError, match=r"holds a as BF16 \[6, 3\] where BF16 \[7, 3\] belongs"):
        placed((second, 0), (first, 1))
    with pytest.raises(DamagedError, match=r"a is missing from the files of rank 1"):
        placed((first, 0))
    with pytest.raises(DamagedError, match=r"holds a, which another file of rank 0 also holds"):
        placed((first, 0), (first, 0), (second, 1))
    (other,) = opened(place_native(planned.native({"c": kinds.CUT["norm"]}, 1)))
    with pytest.raises(DamagedError, match=r"holds c, which does not belong to rank 1"):
        placed((first, 0), (second, 1), (other, 1))
    with pytest.raises(DamagedError, match=r"does not belong to rank 0"):
        place_opened(sparse(), [(opened(place_native(sparse()))[2], 0)])
    for wrong in (planned.native({**tensors, "a": ("F16", kinds.CUT["column"][1])}, 2),):
        with pytest.raises(DamagedError, match=r"holds a as F16 \[7, 3\] where BF16"):
            placed(*((file, rank) for rank, file in enumerate(opened(place_native(wrong)))))


def test_a_name_that_no_header_can_hold() -> None:
    layout = planned.native({"__metadata__": kinds.CUT["norm"]}, 2)
    with pytest.raises(UnsupportedError, match="__metadata__"):
        place_native(layout)
