"""Any layout to any other: every engine's files are made again, byte by byte, from every other engine's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import enginemodels as models
import numpy as np
import pytest
from enginemodels import Tensors, read_all

from tpshard.convert import split
from tpshard.errors import TpshardError, UnsupportedError
from tpshard.exporting.checking import verify_engine
from tpshard.exporting.export import export
from tpshard.exporting.merging import merge_engine
from tpshard.exporting.native import reshard_engine
from tpshard.exporting.registry import engines

Maker = Callable[[Path], tuple[Path, Tensors]]

DENSE = frozenset({"megatron", "megatron-legacy", "meta", "sglang", "transformers", "trtllm", "vllm"})
MODELS: dict[str, tuple[Maker, frozenset[str]]] = {
    "llama": (models.llama, DENSE),
    "tied": (lambda at: models.llama(at, tied=True), DENSE),
    "mixtral": (models.mixtral, DENSE - {"meta", "sglang"}),
    "qwen3_moe": (models.qwen3_moe, DENSE - {"meta", "sglang", "trtllm"}),
    "deepseek_v3": (
        lambda at: models.deepseek_v3(at, predicted=0),
        frozenset({"deepseek", "megatron", "megatron-legacy", "transformers", "vllm"}),
    ),
}
"""Small models, and engines that take them at least."""

OWN_CONFIG = frozenset({"trtllm"})
"""Engines whose config.json is of their own format, so that the model's has to be named to read their files."""

ALIKE = frozenset({("sglang", "vllm")})
"""What the first writes of a dense model is what the second wrote in an earlier version."""


ONCE = frozenset({"megatron", "transformers"})
"""Engines whose files hold every number once: no replica tells that a file is of another model."""


class Made:
    """A model and what every engine that takes it holds of it at TP 2."""

    def __init__(self, at: Path, make: Maker) -> None:
        self.at = at
        self.source, self.tensors = make(at / "hf")
        self.direct: dict[str, Path] = {}
        for engine in engines():
            try:
                export(self.source, at / engine, engine, 2)
            except UnsupportedError:
                continue
            self.direct[engine] = at / engine

    def config(self, engine: str) -> Path | None:
        return self.source if engine in OWN_CONFIG else None


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Sizes that every engine can share among two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("VOCAB", 128), ("LAYERS", 3), ("EXPERTS", 4)):
            patch.setattr(models, name, value)
        found = Made(tmp_path_factory.mktemp(request.param), MODELS[request.param][0])
        assert MODELS[request.param][1] <= found.direct.keys()
        yield found


def weights(directory: Path) -> dict[str, bytes]:
    """Everything but what the checkpoint lent."""
    lent = {"config.json", "tokenizer.json"}
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in lent)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def require_tensors(directory: Path, wanted: Tensors) -> None:
    """The directory is a checkpoint with these tensors; experts may be stacked as transformers has them in memory."""
    found = {name: value for tensors in read_all(directory).values() for name, value in tensors.items()}
    if not any("block_sparse_moe" in name for name in found):  # as transformers calls all modules of experts today
        wanted = {renamed(name): value for name, value in wanted.items()}
    wanted = dict(wanted)
    for name in sorted(found.keys() - wanted.keys()):
        at, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        experts = range(len(found[name]))
        matrices = [[wanted.pop(f"{at}.{expert}.{part}.weight") for part in parts] for expert in experts]
        wanted[name] = np.stack([np.concatenate(of_expert) for of_expert in matrices])
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name


def renamed(name: str) -> str:
    for old, new in (("block_sparse_moe", "mlp"), ("w1.", "gate_proj."), ("w3.", "up_proj."), ("w2.", "down_proj.")):
        name = name.replace(old, new)
    return name


def test_every_engine_from_every_other(made: Made, tmp_path: Path) -> None:
    for there, wanted in made.direct.items():
        for here, directory in made.direct.items():
            if here in OWN_CONFIG:
                continue
            out = tmp_path / f"{here}-{there}"
            export(directory, out, there, 2, source_engine=here)
            assert weights(out) == weights(wanted), f"{here} -> {there}"
            assert verify_engine(out, against=made.source, engine=there, config=made.config(there)).passed
            shutil.rmtree(out)


def test_back_to_a_checkpoint(made: Made, tmp_path: Path) -> None:
    for engine, directory in made.direct.items():
        merge_engine(directory, tmp_path / engine, engine=engine, config=made.config(engine))
        require_tensors(tmp_path / engine, made.tensors)


def test_through_all_engines_and_other_degrees(made: Made, tmp_path: Path) -> None:
    """Native shards, then every engine in turn at alternating degrees, then a checkpoint."""
    split(made.source, tmp_path / "shards", 2)
    here, before = tmp_path / "shards", None
    for number, engine in enumerate(sorted(made.direct.keys() - OWN_CONFIG)):
        out = tmp_path / engine
        export(here, out, engine, 1 + number % 2, source_engine=before)
        here, before = out, engine
    merge_engine(here, tmp_path / "back", engine=before)
    require_tensors(tmp_path / "back", made.tensors)


def test_from_shards_of_an_uneven_degree(made: Made, tmp_path: Path) -> None:
    """Three ranks share neither eight heads nor 32 channels equally."""
    split(made.source, tmp_path / "three", 3)
    for engine, wanted in made.direct.items():
        export(tmp_path / "three", tmp_path / engine, engine, 2)
        assert weights(tmp_path / engine) == weights(wanted), engine


def test_to_shards(made: Made, tmp_path: Path) -> None:
    from tpshard.convert import merge

    for engine in made.direct.keys() - OWN_CONFIG:
        reshard_engine(made.direct[engine], tmp_path / engine, 3, engine=engine)
        merge(tmp_path / engine, tmp_path / f"{engine}-back")
        require_tensors(tmp_path / f"{engine}-back", made.tensors)


# -- what is no whole directory of the engine -------------------------------------------------------


def refused(tmp_path: Path, act: Callable[[Path], Any]) -> str:
    """The message with which it is refused; nothing is written."""
    out = tmp_path / "refused"
    with pytest.raises(TpshardError) as error:
        act(out)
    assert not out.exists()
    assert not [path for path in tmp_path.iterdir() if "refused" in path.name]
    return str(error.value)


def test_another_engines_directory(made: Made, tmp_path: Path) -> None:
    for here, directory in made.direct.items():
        for other in engines().keys() - {here}:
            if (here, other) in ALIKE:
                merge_engine(directory, tmp_path / other, engine=other)
                require_tensors(tmp_path / other, made.tensors)
                continue
            message = refused(tmp_path, lambda out, at=directory, other=other: merge_engine(at, out, engine=other))
            assert len(message) > 30


def test_an_index_of_another_time_beside(made: Made, tmp_path: Path) -> None:
    """It names files that are not there: what is made must not carry it on."""
    stale = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})
    for engine in made.direct.keys() - OWN_CONFIG:
        directory = Path(shutil.copytree(made.direct[engine], tmp_path / engine))
        (directory / "model.safetensors.index.json").write_text(stale)
        merge_engine(directory, tmp_path / f"{engine}-back", engine=engine)
        require_tensors(tmp_path / f"{engine}-back", made.tensors)
        assert not (tmp_path / f"{engine}-back" / "model.safetensors.index.json").exists()
        export(directory, tmp_path / f"{engine}-again", engine, 1, source_engine=engine)
        assert not (tmp_path / f"{engine}-again" / "model.safetensors.index.json").exists()


def test_ranks_of_two_exports(made: Made, tmp_path: Path) -> None:
    """A rank's files of another degree, or of another model of the same shape, among the others."""
    other = Path(shutil.copytree(made.source, tmp_path / "other"))
    changed = read_all(other)["model.safetensors"]
    models.save_file({name: value + 1 for name, value in changed.items()}, other / "model.safetensors")
    for engine, directory in made.direct.items():
        config = made.config(engine)
        for kind, source, degree in (("model", other, 2), ("degree", made.source, 1)):
            strange = tmp_path / f"{engine}-of-another-{kind}"
            export(source, strange, engine, degree)
            mixed = Path(shutil.copytree(directory, tmp_path / f"{engine}-another-{kind}"))
            theirs = sorted(weights(strange), key=lambda name: (strange / name).stat().st_size)
            name = [name for name in theirs if (mixed / name).exists() or kind == "degree"][-1]
            shutil.copyfile(strange / name, mixed / name)
            if kind == "model" and engine in ONCE:  # then only the source can tell
                assert not verify_engine(mixed, against=made.source, engine=engine).passed
                continue
            refused(
                tmp_path,
                lambda out, at=mixed, engine=engine, config=config: merge_engine(
                    at, out, engine=engine, config=config
                ),
            )
