"""A split held against its source, with everything that every split must keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from commands import ok
from weights import Tensor, ranks, read_all, tree


class Cut(NamedTuple):
    """A split and what it was made of."""

    source: dict[str, Tensor]
    ranks: list[dict[str, Tensor]]
    directory: Path
    said: str  # on stderr
    report: dict[str, Any]

    def holds(self, name: str, *held: str, axis: int = 0) -> None:
        """Every rank stores these ranges of the source's tensor, in this order, bit for bit."""
        assert len(held) == len(self.ranks)
        for rank, (tensors, text) in enumerate(zip(self.ranks, held, strict=True)):
            index: list[int] = []
            for part in text.split():
                first, _, last = part.partition("-")
                index += range(int(first), int(last or first) + 1)
            expected = self.source[name].array.take(index, axis)
            assert tensors[name].dtype == self.source[name].dtype
            assert tensors[name].shape == expected.shape, (rank, name)
            assert np.array_equal(tensors[name].array, expected), (rank, name)

    def whole(self, *names: str) -> None:
        for name in names:
            assert all(tensors[name] == self.source[name] for tensors in self.ranks), name


def cut(source: Path, tmp_path: Path, tp_size: int, *flags: str) -> Cut:
    """Split twice to identical bytes, merge to exactly the source, and return the split."""
    out, again, merged = (tmp_path / f"{name}{tp_size}" for name in ("out", "again", "merged"))
    done = ok("split", source, out, "--tp", tp_size, "--json", *flags)
    ok("split", source, again, "--tp", tp_size, *flags)
    assert tree(out) == tree(again)
    ok("merge", out, merged)
    assert tree(merged) == tree(source)
    held = ranks(out)
    assert len(held) == tp_size
    assert all(tensors.keys() == held[0].keys() for tensors in held)
    return Cut(read_all(source), held, out, done.err, json.loads(done.out))


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in values.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config))
