"""Shards of a tiny checkpoint whose stored tensors can be read and changed, for the tests of the verifier."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpshard.convert import split
from tpshard.numerics.forward import forward
from tpshard.numerics.stores import rank_store
from tpshard.shards import open_shards
from tpshard.source import open_source
from tpshard.verdicts import LevelVerdict


class Sharded:
    """A split of ``source`` to be damaged: its own copy of everything but the source."""

    def __init__(self, source: Path, directory: Path, tp_size: int) -> None:
        self.source, self.root, self.tp_size = source, directory / f"tp{tp_size}", tp_size
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)
        split(source, self.root, tp_size)

    def get(self, rank: int, name: str) -> torch.Tensor:
        """What the rank stores, in the stored dtype."""
        store = rank_store(open_shards(self.root), rank)
        part = store.parts[name]
        try:
            return store.raw(part, 0, part.shape[0])
        finally:
            store.close()

    def put(self, rank: int, name: str, value: torch.Tensor) -> None:
        """Store other values of the same shape and dtype; digests in the manifest are left as they were."""
        shards = open_shards(self.root)
        store = rank_store(shards, rank)
        part = store.parts[name]
        store.close()
        assert tuple(value.shape) == part.shape
        with shards.paths()[part.file].open("r+b") as file:
            file.seek(part.offset)
            file.write(value.contiguous().view(torch.uint8).numpy().tobytes())

    def change(self, rank: int, name: str, how: Callable[[torch.Tensor], Any]) -> None:
        """Change what the rank stores: ``how`` works in place or returns the new values."""
        value = self.get(rank, name)
        result = how(value)
        self.put(rank, name, value if result is None else result)

    def configure(self, **values: Any) -> None:
        """Edit the config.json of the shards."""
        path = self.root / "config.json"
        config = json.loads(path.read_text())
        for key, value in values.items():
            if key == "rope_theta" and "rope_parameters" in config:
                config["rope_parameters"][key] = value
            else:
                config[key] = value
        path.write_text(json.dumps(config))

    def verify(self, **how: Any) -> LevelVerdict:
        """The level *forward*, zero-padded unless told otherwise."""
        return forward(open_shards(self.root), open_source(self.source), **({"mode": "zero-pad"} | how))


def flip_lowest_bit(*index: int) -> Callable[[torch.Tensor], None]:
    """The smallest change there is: the last bit of one stored value."""

    def flip(value: torch.Tensor) -> None:
        value.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])[index] ^= 1

    return flip


def points(verdict: LevelVerdict) -> list[str]:
    """The points named by the findings, in the order of the model; the end-to-end comparison left out."""
    return [finding.tensor for finding in verdict.findings if finding.tensor != "logits"]
