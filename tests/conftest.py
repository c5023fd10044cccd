"""Checkpoints that several test files use, each made once a session. They are shared: copy before changing one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import weights

SHARED = Path(os.environ.get("TPSHARD_SHARED") or Path(__file__).resolve().parent.parent.parent / "shared")

Case = Callable[[str], Path]


def _make_fixtures() -> Any:
    path = SHARED / "cases" / "make_fixtures.py"
    if not path.exists():
        pytest.skip(f"needs {path} (set TPSHARD_SHARED to the reference material)")
    pytest.importorskip("torch", reason="the cases are made with torch")
    pytest.importorskip("transformers", reason="the cases are made with transformers")
    spec = importlib.util.spec_from_file_location("make_fixtures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """``case("F-LLAMA6")``: that checkpoint of the reference material's cases."""
    directory = tmp_path_factory.mktemp("cases")
    made: list[Any] = []

    def get(name: str) -> Path:
        if not (directory / name).exists():
            if not made:
                made.append(_make_fixtures())
            module = made[0]
            if name in module.SPECIAL:
                module.SPECIAL[name](str(directory))
            else:
                module.dump(module.fresh(module.CONF[name]()), str(directory / name))
        return directory / name

    return get


@pytest.fixture
def doctored(case: Case, tmp_path: Path) -> Case:
    """A copy of a case to be changed."""

    def get(name: str) -> Path:
        return Path(shutil.copytree(case(name), tmp_path / f"doctored-{name}"))

    return get


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in one file that takes degrees 1 to 8."""
    return weights.write_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same Llama in three files with an index."""
    return weights.write_llama(tmp_path_factory.mktemp("llama3") / "model", files=3)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 200 MB: a Llama of one wide layer, filled with a block of noise that fits no row."""
    directory = tmp_path_factory.mktemp("large") / "model"
    directory.mkdir()
    config = weights.CONFIG | {"hidden_size": 1024, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32000}
    config["num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0).bytes(1_000_003)
    block = noise * 70
    tensors = {
        name: weights.Tensor("BF16", shape, block[: weights.nbytes("BF16", shape)])
        for name, shape in weights.llama_shapes(config).items()
    }
    weights.write(directory / "model.safetensors", tensors)
    assert (directory / "model.safetensors").stat().st_size > 180_000_000
    return directory
