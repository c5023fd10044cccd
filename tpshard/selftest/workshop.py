"""The good shards of the self-test: made once, then copied for every fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tpshard.convert import reshard, split
from tpshard.options import Options
from tpshard.shards import Shards, open_shards
from tpshard.source import Source, open_source

from .models import build, write


@dataclass
class Workshop:
    """A temporary directory, and what was made in it so far."""

    root: Path
    options: Options = field(default_factory=lambda: Options(threads=1))
    _numbers: Iterator[int] = field(default_factory=count)
    _shards: dict[tuple[str, int, int], Shards] = field(default_factory=dict)
    _sources: dict[tuple[str, int], Source] = field(default_factory=dict)

    def source(self, family: str, seed: int = 0) -> Source:
        """The checkpoint of a family of the zoo."""
        key = family, seed
        if key not in self._sources:
            directory = self.root / f"{family}-{seed}"
            if family == "bitnet":
                build(bitnet(), seed).save_pretrained(directory)
            else:
                write(family, directory, seed)
            self._sources[key] = open_source(directory)
        return self._sources[key]

    def shards(self, family: str, tp_size: int, seed: int = 0) -> Shards:
        """Good shards of it."""
        key = family, tp_size, seed
        if key not in self._shards:
            source = self.source(family, seed)
            directory = self.root / f"{family}-{seed}-tp{tp_size}"
            split(source.root, directory, tp_size, options=self.options)
            self._shards[key] = open_shards(directory)
        return self._shards[key]

    def resharded(self, family: str, tp_size: int, to: int, seed: int = 0) -> Shards:
        """Good shards that were cut anew from others."""
        directory = self.fresh()
        reshard(self.shards(family, tp_size, seed).root, directory, to, options=self.options)
        return open_shards(directory)

    def fresh(self) -> Path:
        """A path that nothing is at yet."""
        return self.root / f"copy-{next(self._numbers)}"

    def degrees(self, family: str) -> list[int]:
        """Degrees from 2 to 4 that the family takes, unequal ones included."""
        axes = [axis for dims in self.shards(family, 2).manifest.dims.values() for dim in dims for axis in dim.axes]
        most = min(axis.parts() for axis in axes)
        return [n for n in (2, 3, 4) if n <= most]


def bitnet() -> object:
    """A model with norms between a column-parallel matrix and a row-parallel one, for one of the wrong plans."""
    import transformers

    return transformers.BitNetConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=2,
        vocab_size=96, tie_word_embeddings=False,
    )  # fmt: skip
