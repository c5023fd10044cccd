"""Kinds of models that were derived wrong once: names of unlike modules, operators that hide what feeds what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import zoo  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from tpshard.cli import cli  # noqa: E402
from tpshard.derivation.derive import derive  # noqa: E402
from tpshard.derivation.patterns import Patterns  # noqa: E402
from tpshard.derivation.proof import without_paths  # noqa: E402
from tpshard.derivation.smooth import smooth  # noqa: E402
from tpshard.errors import UsageError  # noqa: E402

F = torch.nn.functional
nn = torch.nn


class Layer(nn.Module):
    def __init__(self, listed: type) -> None:
        super().__init__()
        parts = nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 4)
        self.ffn = nn.Sequential(*parts) if listed is nn.Sequential else nn.ModuleList(parts)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


@pytest.mark.parametrize("listed", [nn.Sequential, nn.ModuleList])
def test_unlike_modules_in_a_row_keep_their_numbers(listed: type) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(listed) for _ in range(2))
    patterns = Patterns(dict(model.named_modules()))
    names = [name for name, _ in model.named_parameters()]
    assert sorted(patterns.sorted(names)) == [
        "layers.#.experts.#.bias", "layers.#.experts.#.weight",
        "layers.#.ffn.0.bias", "layers.#.ffn.0.weight", "layers.#.ffn.2.bias", "layers.#.ffn.2.weight",
    ]  # fmt: skip
    assert patterns.of("layers.1.ffn.2.weight") == patterns.of("layers.7.ffn.2.weight")


def test_layers_in_a_sequential_are_copies() -> None:
    model = nn.Module()
    model.layers = nn.Sequential(Layer(nn.Sequential), Layer(nn.Sequential))
    assert Patterns(dict(model.named_modules())).of("layers.1.experts.2.weight") == "layers.#.experts.#.weight"


scores = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6)


@settings(deadline=None)
@given(scores, st.integers(0, 5))
def test_a_smooth_softmax_keeps_order_and_masks_and_hides_nothing(values: list[float], masked: int) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    where = masked % len(values)
    x[where] = torch.finfo(torch.float64).min
    x.requires_grad_()
    shares = smooth(F.softmax, (x,), {"dim": -1})
    assert torch.allclose(shares.sum(), torch.ones((), dtype=torch.float64)) and float(shares[where]) == 0.0
    order = x.detach().argsort()
    assert bool((shares.detach()[order].diff() >= 0).all())
    if len(values) > 2:  # one that is left alone has all of it, whatever its score
        weights = torch.arange(2.0, len(values) + 2, dtype=torch.float64).sqrt()
        (gradient,) = torch.autograd.grad((shares * weights).sum(), x)
        assert ((gradient != 0) == (torch.arange(len(values)) != where)).all(), gradient


def test_what_is_added_to_all_scores_is_noticed() -> None:
    """A softmax does not notice it: a bias of the keys feeds the heads by rounding alone."""
    query, key, value = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    out = smooth(F.scaled_dot_product_attention, (query, key + bias, value), {"is_causal": True})
    (gradient,) = torch.autograd.grad((out * torch.randn_like(out)).sum(), bias)
    assert float(gradient.abs().min()) > 1e-6


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", ["none", "causal", "boolean", "added"])
def test_smooth_attention_looks_where_attention_looks(way: str, shared: bool) -> None:
    query = torch.randn(2, 4, 5, 4, dtype=torch.float64)
    key, value = (torch.randn(2, 2 if shared else 4, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    more: dict[str, Any] = {"enable_gqa": shared}
    if way == "causal":
        more["is_causal"] = True
    elif way != "none":
        added = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
        more["attn_mask"] = allowed if way == "boolean" else added
    for head in range(4):
        seen = []
        for run in (F.scaled_dot_product_attention, lambda *a, **k: smooth(F.scaled_dot_product_attention, a, k)):
            out = run(query, key, value, **more)
            found = torch.autograd.grad(out[:, head, 1].sum(), (key, value))
            seen.append([g.abs().sum(-1) > 1e-9 for g in found])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("name", ["ctrl", "glm"])
def test_a_kind_that_failed_is_derived_whole(name: str, tmp_path: Path) -> None:
    """CTRL's feed-forward is an ``nn.Sequential``; GLM's keys have a bias of which a softmax notices half."""
    zoo.write(name, tmp_path / "model")
    found = derive(tmp_path / "model", degrees=(2,))
    assert found.proven and found.fraction > 0.99, (found.whole, found.trials)


def test_a_message_names_no_path_that_is_gone(tmp_path: Path) -> None:
    message = f"{tmp_path}/one/model.safetensors: x.weight has 3 rows; cut {tmp_path}/one again"
    said = without_paths(message, tmp_path)
    assert str(tmp_path) not in said and "x.weight has 3 rows" in said


@pytest.mark.parametrize("degrees", ["1", "0,2", "two", "2,", "-2", "2,1000"])
def test_bad_degrees_are_refused_at_once(degrees: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["derive", str(tmp_path), "--degrees", degrees])
    assert done.exit_code == 2 and "degrees" in done.output


def test_a_file_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a model\n")
    done = CliRunner().invoke(cli, ["derive", str(tmp_path / "README.md")])
    assert isinstance(done.exception, UsageError) and "is a file; give the directory" in str(done.exception)


def test_cross_attention_without_its_encoder_is_cut(tmp_path: Path) -> None:
    """The decoder of BART alone: an encoder's states are an input of its cross-attention."""
    zoo.write("bart", tmp_path / "model")
    found = derive(tmp_path / "model", degrees=(2,))
    assert found.proven and not any("encoder_attn" in name for name in found.whole), (found.whole, found.trials)
