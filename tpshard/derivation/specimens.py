"""Tiny checkpoints of an architecture: one of the model's own config made small, one with other numbers."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tpshard.errors import TpshardError
from tpshard.numerics.skeleton import model_class, read_config
from tpshard.numerics.twin import write_twin
from tpshard.numerics.twinconfig import shrunk

from .variation import varied

SMALL = 3_000_000  # parameters of a model that is taken as it is
MOST_VARIED = 6_000_000
_DROPPED = (
    "quantization_config",
    "compression_config",
    "torch_dtype",
    "dtype",
    "_name_or_path",
    "transformers_version",
)
TP_SIZE = 4  # what the small config has units for
SEEDS = (0, 1)


class Specimens:
    """The tiny checkpoints, in a directory that is cleared by the caller.

    Args:
        values: the model's ``config.json``.
        code: files of the model's own code, for the classes in ``auto_map``.

    Raises:
        UnsupportedError: transformers has no class for the config, or it cannot be built small.
    """

    def __init__(
        self, values: Mapping[str, Any], directory: Path, code: Sequence[Path], *, trust_remote_code: bool
    ) -> None:
        self.code, self.trusted, self.directory = code, trust_remote_code, directory
        own = {key: value for key, value in values.items() if key not in _DROPPED}
        self.small = own if self._size(own) <= SMALL else shrunk(own, TP_SIZE)
        self.roots = [directory / "one", directory / "two"]
        self._write(self.small, self.roots[0], SEEDS[0])
        self.other = varied(self.small, self._runs)
        self.differs = self.other != self.small
        if self.differs:
            self._write(self.other, self.roots[1], SEEDS[1])
        else:
            self.roots.pop()

    def _write(self, values: dict[str, Any], root: Path, seed: int) -> None:
        write_twin(values, root, seed=seed, trust_remote_code=self.trusted, code=self.code)

    def parsed(self, values: Mapping[str, Any]) -> tuple[Any, Any]:
        """transformers' config of these values, and the class that runs it."""
        with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
            root = Path(scratch)
            (root / "config.json").write_text(json.dumps(values), encoding="utf-8")
            for file in self.code:
                shutil.copyfile(file, root / file.name)
            config = read_config(root, self.trusted)
            return config, model_class(config, root, self.trusted)

    def _size(self, values: Mapping[str, Any]) -> int:
        config, cls = self.parsed(values)
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in cls._from_config(config).parameters())
        except TpshardError:
            raise
        except Exception:  # too odd to build at its own size: made small, it may be built
            return SMALL + 1

    def _runs(self, values: Mapping[str, Any]) -> bool:
        """Whether a model of this config is small, can be built, and runs on a few tokens."""
        try:
            config, cls = self.parsed(values)
            with torch.device("meta"):
                if sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters()) > MOST_VARIED:
                    return False
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                model = cls._from_config(config, dtype=torch.float32).eval()
                model(input_ids=torch.arange(3, 11)[None])
        except Exception:  # whatever a class makes of numbers that do not go together
            return False
        return True

    def as_dict(self, root: Path) -> dict[str, Any]:
        """The config of a specimen as its class gives it, defaults included."""
        values: dict[str, Any] = read_config(root, self.trusted).to_dict()
        return values

    def without(self, root: Path, key: tuple[str, ...]) -> int | None:
        """What a key of a specimen's config is when ``config.json`` leaves it out; None where that is no number."""
        values = copy.deepcopy(self.as_dict(root))
        inner = values
        for part in key[:-1]:
            inner = inner[part]
        inner.pop(key[-1], None)
        try:
            config, _ = self.parsed(values)
            found: Any = config.to_dict()
            for part in key:
                found = found[part]
        except Exception:  # the class cannot do without
            return None
        return found if isinstance(found, int) and not isinstance(found, bool) else None
