"""The three operations on one small model, and what must be true of an output that is not finished."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from weights import tree, write_llama

from tpshard import DamagedError, UsageError, inspect, merge, reshard, split, verify
from tpshard.errors import TpshardError
from tpshard.options import Options
from tpshard.reports import Conversion

VERBS = ("split", "reshard", "merge")


class Operation(NamedTuple):
    """One of the three, with a source, and the files that it makes when nothing disturbs it."""

    verb: str
    source: Path
    expected: dict[str, str]

    def __call__(self, out: Path, **options: Any) -> Conversion:
        given = Options(**options)
        if self.verb == "split":
            return split(self.source, out, 3, options=given)
        if self.verb == "reshard":
            return reshard(self.source, out, 2, options=given)
        return merge(self.source, out, options=given)

    def words(self, out: Path) -> list[str]:
        """The command line."""
        degree = {"split": ["--tp", "3"], "reshard": ["--tp", "2"], "merge": []}[self.verb]
        return [self.verb, str(self.source), str(out), *degree]


def operations(directory: Path, **config: Any) -> dict[str, Operation]:
    """Split, reshard and merge of a small Llama in three files, by verb."""
    model = write_llama(directory / "model", files=3, **config)
    split(model, directory / "shards", 3)
    split(model, directory / "two", 2)
    return {
        "split": Operation("split", model, tree(directory / "shards")),
        "reshard": Operation("reshard", directory / "shards", tree(directory / "two")),
        "merge": Operation("merge", directory / "shards", tree(model)),
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Operation]:
    return operations(tmp_path_factory.mktemp("small"))


def places(out: Path) -> list[Path]:
    """The output and wherever a part of it may lie while it is made."""
    partial = out.with_name(f"{out.name}.tpshard-partial")
    return [out, partial, partial / "output", partial / "replaced"]


def require_unaccepted(out: Path, whole: list[dict[str, str]], into: Path) -> None:
    """Nothing takes what lies there for an output, unless it is one of the ``whole``, byte for byte."""
    for place in places(out):
        if not os.path.lexists(place) or tree(place) in whole:
            continue
        for attempt in attempts(place, into):
            with pytest.raises((UsageError, DamagedError)):
                attempt()
            assert not os.path.lexists(into)


def attempts(place: Path, into: Path) -> list[Callable[[], object]]:
    """What a user may try with a directory."""
    return [
        lambda: merge(place, into),
        lambda: verify(place),
        lambda: reshard(place, into, 2),
        lambda: inspect(place),
        lambda: split(place, into, 2),
    ]


def from_pretrained_takes(place: Path) -> bool:
    """Whether transformers loads a model from there."""
    transformers = pytest.importorskip("transformers")
    try:
        transformers.AutoModelForCausalLM.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError):
        return False
    except Exception as error:  # safetensors has its own class
        assert type(error).__name__ == "SafetensorError", error
        return False
    return True


__all__ = ["VERBS", "Operation", "TpshardError", "operations", "places", "require_unaccepted", "small"]
