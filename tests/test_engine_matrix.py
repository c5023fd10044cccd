"""Rows of docs/engine-matrix.md against what the code does now."""

from __future__ import annotations

import enginepage
import numpy as np
import pytest
from enginepage import DIFFERENT, NONE, PAGE, READ, UNMADE, WRITTEN

from tpshard.exporting.registry import engines

SAMPLE = ("bloom", "deepseek_v3", "gpt2", "gpt_neox", "llama", "mixtral", "olmo2", "qwen3_moe")
"""Small to make; every engine takes one of them and refuses one."""


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    return enginepage.rows_of(PAGE.read_text())


def test_the_page_knows_every_engine_and_nothing_comes_back_different(rows: dict[str, list[str]]) -> None:
    assert rows["model"] == list(engines())
    cells = [cell for name, row in rows.items() if name not in ("model", "---") for cell in row]
    assert set(cells) <= {READ, WRITTEN, NONE, UNMADE}
    assert DIFFERENT not in cells
    for at, engine in enumerate(engines()):
        assert READ in [rows[name][at] for name in SAMPLE], engine
        assert NONE in [rows[name][at] for name in SAMPLE] or engine == "transformers"


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_row_of_the_page(rows: dict[str, list[str]], model_type: str) -> None:
    pytest.importorskip("transformers", reason="the tiny models are made with transformers")
    assert enginepage.row(model_type, engines()) == [model_type, *rows[model_type]]


def test_same_sees_a_changed_row_and_another_number_of_them() -> None:
    import torch

    matrices = [torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 3), np.float32)) for seed in (1, 2)]
    apart = {f"experts.{number}": value for number, value in enumerate(matrices)}
    assert enginepage.same({"experts": torch.stack(matrices)}, apart)
    assert not enginepage.same({"experts": torch.stack([matrices[0]] * 2)}, apart)
    assert not enginepage.same({"experts": torch.stack(matrices) + 1}, apart)
    assert not enginepage.same({**apart, "experts.0": matrices[1]}, apart)
