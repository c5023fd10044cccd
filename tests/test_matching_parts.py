"""What is outside the layers, and models of several stacks: all that belongs together is there, or is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from tpshard.axes import Padded, Units
from tpshard.errors import DamagedError, UnsupportedError
from tpshard.matching import Logical, Matched, match
from tpshard.table import Table

LAYERS, HIDDEN = 2, 8
Shapes = dict[str, tuple[int, ...]]
ffn, vocab = Units("ffn", 6), Padded("vocab", 10)


def table() -> Table:
    """A decoder with two spellings of its pooler, a classifier that may be there, a tower and a stem."""
    t = Table(layers=LAYERS, prefixes=("model.", ""))
    layer = "@layers.{layer}"
    t.shared("@embed.weight", "@encoder.embed.weight", heads=("lm_head.weight",), vocab=vocab.each(), width=HIDDEN)
    t.linear(f"{layer}.down", HIDDEN, ffn.each(), role="down")
    with t.only({1}):
        t.linear(f"{layer}.up", ffn.each(), HIDDEN, role="up")
    with t.block("old pooler"):
        t.linear("@pooler.dense", HIDDEN, HIDDEN, role="pooler", bias=True)
    with t.block("new pooler"):
        t.linear("@pool", HIDDEN, HIDDEN, role="pooler", bias=True)
    t.one_of("old pooler", "new pooler")
    with t.block("classifier"):
        t.linear("score", 2, HIDDEN, role="pooler", bias=True)
        t.tensor("score_scale", 1, role="buffer", optional=True)
    with t.block("relations"):
        t.norm(f"{layer}.relation", HIDDEN, bias=True)
        t.tensor("@relations", HIDDEN, role="norm")
    with t.stack(LAYERS, prefixes=("tower.",), optional=True):
        t.norm("@layers.{layer}.norm", HIDDEN)
        t.norm("@norm", HIDDEN)
    t.whole_module("stem", why="it runs once")
    return t


def shapes() -> Shapes:
    out: Shapes = {"model.embed.weight": (10, HIDDEN)}
    for layer in range(LAYERS):
        out |= {f"model.layers.{layer}.down.weight": (HIDDEN, 6), f"model.layers.{layer}.relation.weight": (HIDDEN,)}
        out[f"model.layers.{layer}.relation.bias"] = (HIDDEN,)
        out[f"tower.layers.{layer}.norm.weight"] = (HIDDEN,)
    out["model.layers.1.up.weight"] = (6, HIDDEN)
    out |= {"model.pool.weight": (HIDDEN, HIDDEN), "model.pool.bias": (HIDDEN,), "model.relations": (HIDDEN,)}
    out |= {"score.weight": (2, HIDDEN), "score.bias": (2,), "score_scale": (1,), "tower.norm.weight": (HIDDEN,)}
    return out | {"stem.conv.weight": (3, 3)}


def found(held: Mapping[str, tuple[int, ...]]) -> Matched:
    return match(table(), [Logical(name, "F32", shape) for name, shape in held.items()])


def without(*names: str) -> Shapes:
    return {name: shape for name, shape in shapes().items() if name not in names}


def all_but(beginnings: Iterable[str]) -> Shapes:
    return {name: shape for name, shape in shapes().items() if not name.startswith(tuple(beginnings))}


def test_the_whole_model_is_known() -> None:
    assert found(shapes()).dims.keys() == shapes().keys()


@pytest.mark.parametrize("name", [name for name in shapes() if name != "score_scale"])
def test_each_missing_tensor_is_named(name: str) -> None:
    """Of a layer, a block outside the layers, a stack that may lack as a whole, a module, one with several names."""
    with pytest.raises(DamagedError, match="stem" if name.startswith("stem") else name):
        found(without(name))


def test_what_may_lack_as_a_whole() -> None:
    assert "score_scale" not in found(without("score_scale")).dims
    for part in (["tower."], ["score"], ["model.relations", *(f"model.layers.{n}.relation" for n in range(LAYERS))]):
        assert found(all_but(part)).dims


def test_an_optional_tensor_of_a_block_asks_for_the_others() -> None:
    with pytest.raises(DamagedError, match=r"score\.weight is missing"):
        found(without("score.weight", "score.bias"))


def test_one_block_of_a_choice_outside_the_layers() -> None:
    with pytest.raises(DamagedError, match="outside its layers holds none of: old pooler, new pooler"):
        found(without("model.pool.weight", "model.pool.bias"))
    old = {"model.pooler.dense.weight": (HIDDEN, HIDDEN), "model.pooler.dense.bias": (HIDDEN,)}
    assert found(without("model.pool.weight", "model.pool.bias") | old).dims
    with pytest.raises(DamagedError, match="holds old pooler and new pooler"):
        found(shapes() | old)


def test_one_tensor_under_several_names() -> None:
    """Tied to the first that is held; names of parts that the checkpoint has not are not its."""
    assert found(shapes()).aliases == {"lm_head.weight": "model.embed.weight"}
    other = without("model.embed.weight") | {"model.encoder.embed.weight": (10, HIDDEN)}
    assert found(other).aliases == {"lm_head.weight": "model.encoder.embed.weight"}


def test_a_layer_that_has_no_such_rule() -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.0\.up\.weight"):
        found(shapes() | {"model.layers.0.up.weight": (6, HIDDEN)})


@pytest.mark.parametrize("layer", [LAYERS, LAYERS + 7])
def test_layers_beyond_those_of_their_own_stack(layer: int) -> None:
    with pytest.raises(DamagedError, match=rf"tower\.layers\.{layer}\.norm\.weight is there"):
        found(shapes() | {f"tower.layers.{layer}.norm.weight": (HIDDEN,)})


def spelled() -> Table:
    """Two spellings of one model, whose layers differ."""
    t = Table(layers=0)
    with t.stack(1, prefixes=("a.",), optional=True) as one:
        t.norm("@layers.{layer}.norm", HIDDEN)
    with t.stack(2, prefixes=("b.",), optional=True) as other:
        t.norm("@layers.{layer}.norm", HIDDEN)
    t.one_stack_of(one, other)
    return t


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a.layers.0"], ""), (["b.layers.0", "b.layers.1"], ""), ([], "none of"), (["b.layers.0"], "is missing"),
     (["a.layers.0", "b.layers.0", "b.layers.1"], "both")],
)  # fmt: skip
def test_exactly_one_spelling(names: list[str], said: str) -> None:
    held = [Logical(f"{name}.norm.weight", "F32", (HIDDEN,)) for name in names]
    if not said:
        assert len(match(spelled(), held).dims) == len(names)
    else:
        with pytest.raises(DamagedError, match=said):
            match(spelled(), held)


@pytest.mark.parametrize("shape", [(3, 6, 8), (3, 8, 6), (3, 8, 8), (2, 6, 8)])
def test_either_order_of_the_last_two_dimensions(shape: tuple[int, ...]) -> None:
    t = Table(layers=1)
    t.tensor("layers.{layer}.experts", 3, ffn.each(), HIDDEN, role="expert_up", either_way=True)
    held = [Logical("layers.0.experts", "F32", shape)]
    if sorted(shape) == [3, 6, 8]:
        dims = match(t, held).dims["layers.0.experts"]
        assert [bool(dim.axes) for dim in dims] == [length == 6 for length in shape]
    else:
        with pytest.raises(DamagedError):
            match(t, held)
