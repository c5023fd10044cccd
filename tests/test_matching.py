"""A checkpoint's tensors against a table: everything known, everything there, every shape as the config says."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpshard.axes import Heads, Padded, Units, replicated
from tpshard.errors import DamagedError, TpshardError, UnsupportedError
from tpshard.matching import Logical, Matched, match
from tpshard.table import Table, placeholders, rule_template, template_of

LAYERS, EXPERTS, HIDDEN = 4, 3, 8
heads, ffn, vocab = Heads("heads", 4, 2), Units("ffn", 6), Padded("vocab", 10)


def dense(layers: int = LAYERS, tied: bool = False) -> Table:
    t = Table(layers=layers, prefixes=("model.", ""))
    t.embedding("@embed", vocab.each(), HIDDEN)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.q", heads.query(2), HIDDEN, role="q", bias=None)
    t.linear(f"{layer}.down", HIDDEN, ffn.each(), role="down")
    t.norm(f"{layer}.norm", HIDDEN)
    t.tensor(f"{layer}.extra.0.weight", None, role="other", optional=True)
    t.tensor(f"{layer}.extra.2.weight", 5, role="other", optional=True)
    t.norm("@norm", HIDDEN)
    t.head("lm_head", vocab.each(), HIDDEN, tied_to="@embed.weight" if tied else None)
    return t


def tensors(layers: int = LAYERS, prefix: str = "model.") -> dict[str, Logical]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed.weight": (10, HIDDEN)}
    for layer in range(layers):
        at = f"{prefix}layers.{layer}"
        shapes |= {f"{at}.q.weight": (8, HIDDEN), f"{at}.down.weight": (HIDDEN, 6), f"{at}.norm.weight": (HIDDEN,)}
    shapes |= {f"{prefix}norm.weight": (HIDDEN,), "lm_head.weight": (10, HIDDEN)}
    return {name: Logical(name, "BF16", shape) for name, shape in shapes.items()}


def mixed() -> Table:
    """Dense or expert layers, single or stacked experts, and one prediction layer that may be there."""
    t = Table(layers=LAYERS, experts=EXPERTS, extra_layers=1, prefixes=("model.",))
    layer = "@layers.{layer}"
    t.norm(f"{layer}.norm", HIDDEN)
    with t.block("dense"):
        t.linear(f"{layer}.up", ffn.each(), HIDDEN, role="up")
        t.linear(f"{layer}.down", HIDDEN, ffn.each(), role="down")
    with t.block("moe"):
        t.linear(f"{layer}.gate", None, HIDDEN, role="router")
        t.linear(f"{layer}.experts.{{expert}}.up", ffn.each(), HIDDEN, role="expert_up")
        t.linear(f"{layer}.experts.{{expert}}.down", HIDDEN, ffn.each(), role="expert_down")
    t.one_of("dense", "moe")
    return t


def mixed_tensors(moe: Iterable[int] = (2, 3), layers: int = LAYERS) -> dict[str, Logical]:
    shapes: dict[str, tuple[int, ...]] = {}
    moe = set(moe)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.norm.weight"] = (HIDDEN,)
        if layer in moe:
            shapes[f"{at}.gate.weight"] = (EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                shapes[f"{at}.experts.{expert}.up.weight"] = (6, HIDDEN)
                shapes[f"{at}.experts.{expert}.down.weight"] = (HIDDEN, 6)
        else:
            shapes |= {f"{at}.up.weight": (6, HIDDEN), f"{at}.down.weight": (HIDDEN, 6)}
    return {name: Logical(name, "BF16", shape) for name, shape in shapes.items()}


def found(table: Table, held: dict[str, Logical], **options: bool) -> Matched:
    return match(table, held.values(), **options)


def renamed(held: dict[str, Logical], old: str, new: str) -> dict[str, Logical]:
    return {(new if n == old else n): t._replace(name=new if n == old else n) for n, t in held.items()}


def reshaped(held: dict[str, Logical], name: str, *shape: int) -> dict[str, Logical]:
    return {**held, name: held[name]._replace(shape=shape)}


def without(held: dict[str, Logical], *names: str) -> dict[str, Logical]:
    assert set(names) <= held.keys()
    return {n: t for n, t in held.items() if n not in names}


def added(held: dict[str, Logical], name: str, *shape: int) -> dict[str, Logical]:
    return {**held, name: Logical(name, "BF16", shape)}


# -- all is well ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_every_tensor_has_its_rule(prefix: str) -> None:
    result = found(dense(), tensors(prefix=prefix))
    assert result.dims.keys() == result.rules.keys() == tensors(prefix=prefix).keys()
    assert result.dims[f"{prefix}layers.2.q.weight"] == (heads.query(2), replicated(HIDDEN))
    assert result.dims[f"{prefix}layers.0.down.weight"] == (replicated(HIDDEN), ffn.each())
    assert result.rule_of("lm_head.weight").role == "head"
    assert result.dims_of("lm_head.weight") == (vocab.each(), replicated(HIDDEN))
    assert result.unknown == ()
    first, second = (result.dims[f"{prefix}layers.{n}.q.weight"] for n in (0, 1))
    assert first is second, "tensors of one rule share their dimensions"


def test_order_of_the_tensors_is_of_no_consequence() -> None:
    forwards, backwards = tensors(), dict(reversed(tensors().items()))
    assert found(dense(), forwards).dims == found(dense(), backwards).dims


def test_tied_heads() -> None:
    both = found(dense(tied=True), tensors())
    assert both.tied == {"lm_head.weight": "model.embed.weight"}
    assert both.aliases == {}
    one = found(dense(tied=True), without(tensors(), "lm_head.weight"))
    assert one.aliases == {"lm_head.weight": "model.embed.weight"}
    with pytest.raises(DamagedError, match=r"lm_head\.weight is missing"):
        found(dense(), without(tensors(), "lm_head.weight"))


def test_literal_numbers_are_told_apart() -> None:
    held = added(added(tensors(), "model.layers.1.extra.0.weight", 99), "model.layers.1.extra.2.weight", 5)
    assert found(dense(), held).rules["model.layers.1.extra.2.weight"].name.endswith("extra.2.weight")
    with pytest.raises(UnsupportedError, match=r"extra\.1\.weight"):
        found(dense(), added(tensors(), "model.layers.1.extra.1.weight", 5))
    with pytest.raises(DamagedError, match=r"extra\.2\.weight has 4 rows .* implies 5"):
        found(dense(), added(tensors(), "model.layers.1.extra.2.weight", 4))


def test_optional_tensors_on_some_layers() -> None:
    held = added(tensors(), "model.layers.3.q.bias", 8)
    assert found(dense(), held).dims["model.layers.3.q.bias"] == (heads.query(2),)


# -- unknown -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.rotary.weight",
        "model.layers.q.weight",
        "model.layers.0.q.weight_scale",
        "model.layers.0.q",
        "layers.0.q.weight",  # the other prefix, beside the first
        "model.layers.00.q.weight",
        "model.layers.01.q.weight",
        "model.layers.٣.q.weight",
        "model.layers.0x1.q.weight",
        "model.layers.-1.q.weight",
        f"model.layers.{'9' * 5000}.q.weight",
        "Model.norm.weight",
        "norm.weight.",
        "7",
    ],
)
def test_unknown_tensors(name: str) -> None:
    held = added(tensors(), name, 8, HIDDEN)
    with pytest.raises(UnsupportedError, match=r"no rule of the table knows this tensor.*--copy-unknown") as caught:
        found(dense(), held)
    assert str(caught.value).startswith(name[:120])
    assert (name in str(caught.value)) is (len(name) <= 200)
    assert len(str(caught.value)) < 500
    result = found(dense(), held, copy_unknown=True)
    assert result.unknown == (name,)
    assert result.dims[name] == (replicated(8), replicated(HIDDEN))
    assert name not in result.rules


def test_many_unknown_tensors_are_counted() -> None:
    held = tensors()
    for n in range(40):
        held = added(held, f"strange.{n}", 1)
    with pytest.raises(UnsupportedError, match=r"strange\.4 and 35 more: no rule of the table knows these tensors"):
        found(dense(), held)


def test_copying_the_unknown_does_not_excuse_the_missing() -> None:
    held = renamed(tensors(), "model.layers.1.norm.weight", "model.layers.1.norm.gamma")
    with pytest.raises(UnsupportedError, match="gamma"):
        found(dense(), held)
    with pytest.raises(DamagedError, match=r"model\.layers\.1\.norm\.weight is missing"):
        found(dense(), held, copy_unknown=True)


# -- missing -------------------------------------------------------------------------------------------------

MANDATORY = sorted(tensors())


@pytest.mark.parametrize("name", MANDATORY)
def test_each_missing_tensor_is_named(name: str) -> None:
    with pytest.raises(DamagedError, match="download or copy the checkpoint again") as caught:
        found(dense(), without(tensors(), name))
    assert str(caught.value).startswith(f"{name} is missing")


def test_missing_layers() -> None:
    for gone in (0, 2, LAYERS - 1):
        held = without(tensors(), *(n for n in tensors() if f".{gone}." in n))
        with pytest.raises(DamagedError, match=rf"layers\.{gone}\..* is missing .*3 of 4 layers"):
            found(dense(), held)
    with pytest.raises(DamagedError, match=r"layers\.0\..* is missing .*0 of 4 layers"):
        found(dense(), without(tensors(), *(n for n in tensors() if "layers" in n)))
    with pytest.raises(DamagedError, match=r"layers\.4\."):
        found(dense(layers=LAYERS + 1), tensors())
    with pytest.raises(DamagedError):
        found(dense(), {})


def test_too_many_layers() -> None:
    with pytest.raises(DamagedError, match=r"layers\.4\..* is there but the config promises only 4 layers"):
        found(dense(), tensors(layers=LAYERS + 2))
    with pytest.raises(DamagedError, match=r"layers\.999999999\.q\.weight is there"):
        found(dense(), added(tensors(), "model.layers.999999999.q.weight", 8, HIDDEN))


# -- shapes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.layers.2.q.weight", (6, HIDDEN), ["6 rows", "[6, 8]", "implies 8"]),
        ("model.layers.2.q.weight", (8, 9), ["9 columns", "[8, 9]", "implies 8"]),
        ("model.layers.0.down.weight", (HIDDEN, 12), ["12 columns", "implies 6"]),
        ("model.layers.0.down.weight", (6, HIDDEN), ["6 rows", "implies 8"]),
        ("model.norm.weight", (HIDDEN + 1,), ["9 rows", "implies 8"]),
        ("model.norm.weight", (1, HIDDEN), ["2 dimensions [1, 8]", "implies 1"]),
        ("model.norm.weight", (), ["0 dimensions []", "implies 1"]),
        ("model.embed.weight", (11, HIDDEN), ["11 rows", "implies 10"]),
        ("model.embed.weight", (0, HIDDEN), ["0 rows", "implies 10"]),
    ],
)
def test_shapes_that_contradict_the_config(name: str, shape: tuple[int, ...], said: list[str]) -> None:
    with pytest.raises(DamagedError) as caught:
        found(dense(), reshaped(tensors(), name, *shape))
    for part in (name, *said, "not of one model"):
        assert part in str(caught.value)


def test_one_wrong_layer_among_right_ones() -> None:
    for layer in range(LAYERS):
        with pytest.raises(DamagedError, match=rf"layers\.{layer}\.q\.weight has 16 rows"):
            found(dense(), reshaped(tensors(), f"model.layers.{layer}.q.weight", 16, HIDDEN))


def test_the_first_rule_that_is_broken_is_told() -> None:
    held = reshaped(reshaped(tensors(), "lm_head.weight", 12, HIDDEN), "model.embed.weight", 12, HIDDEN)
    for order in (held, dict(reversed(held.items()))):
        with pytest.raises(DamagedError, match=r"model\.embed\.weight has 12 rows"):
            found(dense(), order)


# -- blocks and experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("moe", [(), (0,), (1, 3), range(LAYERS)])
def test_any_layers_may_have_experts(moe: Iterable[int]) -> None:
    held = mixed_tensors(moe)
    assert found(mixed(), held).dims.keys() == held.keys()


@pytest.mark.parametrize("name", sorted(mixed_tensors()))
def test_each_missing_tensor_of_a_mixture(name: str) -> None:
    with pytest.raises(DamagedError) as caught:
        found(mixed(), without(mixed_tensors(), name))
    assert str(caught.value).startswith(f"{name} is missing")


def test_layers_without_any_or_with_both_blocks() -> None:
    held = mixed_tensors()
    with pytest.raises(DamagedError, match="layer 1 holds none of: dense, moe"):
        found(mixed(), without(held, "model.layers.1.up.weight", "model.layers.1.down.weight"))
    gone = [n for n in held if "layers.2" in n and "norm" not in n]
    with pytest.raises(DamagedError, match="layer 2 holds none of: dense, moe"):
        found(mixed(), without(held, *gone))
    both = {**held, **{n: t for n, t in mixed_tensors(()).items() if "layers.2" in n}}
    with pytest.raises(DamagedError, match="layer 2 holds dense and moe"):
        found(mixed(), both)


def test_experts_beyond_and_missing() -> None:
    held = mixed_tensors()
    with pytest.raises(DamagedError, match=r"experts\.3\.up\.weight is one too many: the config promises 3 experts"):
        found(mixed(), added(held, "model.layers.3.experts.3.up.weight", 6, HIDDEN))
    last = [n for n in held if ".experts.2." in n]
    with pytest.raises(DamagedError, match=r"layers\.2\.experts\.2\.up\.weight is missing .* holds 2"):
        found(mixed(), without(held, *last))
    every = [n for n in held if "layers.3.experts" in n]
    with pytest.raises(DamagedError, match=r"layers\.3\.experts\.\S+ is missing"):
        found(mixed(), without(held, *every))
    with pytest.raises(UnsupportedError, match=r"experts\.x\.up"):
        found(mixed(), added(held, "model.layers.3.experts.x.up.weight", 6, HIDDEN))


def test_prediction_layers_are_whole_or_absent() -> None:
    assert found(mixed(), mixed_tensors(layers=LAYERS + 1)).dims
    held = mixed_tensors(layers=LAYERS + 1)
    for name in (n for n in held if "layers.4" in n):
        with pytest.raises(DamagedError):
            found(mixed(), without(held, name))
    with pytest.raises(DamagedError, match=r"layers\.5\..* promises only 4 layers and 1 more for prediction"):
        found(mixed(), mixed_tensors(layers=LAYERS + 2))


# -- names ---------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(st.integers(0, 10**6).map(str), st.sampled_from(["layers", "q", "w1", "h2o", "007", "-1", ""])),
        min_size=1,
    )
)
def test_templates(parts: list[str]) -> None:
    template, numbers = template_of(".".join(parts))
    plain = [part for part in parts if part.isdigit() and str(int(part)) == part]
    assert numbers == tuple(map(int, plain))
    assert template.split(".") == ["#" if part in plain else part for part in parts]


def test_rules_have_the_templates_of_their_tensors() -> None:
    rule = "model.layers.{layer}.experts.{expert}.blocks.0.{other}.weight"
    assert rule_template(rule) == template_of("model.layers.3.experts.17.blocks.0.5.weight")[0]
    assert placeholders(rule) == ("{layer}", "{expert}", "0", "{other}")


@given(
    st.sampled_from(sorted(mixed_tensors())),
    st.lists(st.integers(0, 12), max_size=4),
    st.text("layers.0123#{}@", max_size=12),
)
def test_any_change_ends_in_a_plain_error_or_none(name: str, shape: list[int], tail: str) -> None:
    for held in (
        reshaped(mixed_tensors(), name, *shape),
        renamed(mixed_tensors(), name, name + tail),
        added(mixed_tensors(), tail, *shape),
    ):
        try:
            found(mixed(), held)
        except TpshardError as error:
            assert error.exit_status in (3, 4)
