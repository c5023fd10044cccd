"""The parts of a derivation that need no model: labels read as segments, numbers followed to keys, the text."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from tpshard.axes import Dim, Heads, Units, replicated
from tpshard.derivation.draft import parts
from tpshard.derivation.numbers import Numbers
from tpshard.derivation.variation import is_size, numbers_in, varied


def labels_of(dim: Dim) -> list[tuple[str, int]]:
    """The labels that experiments would give the indices of a dimension: which unit or group each belongs to."""
    out: list[tuple[str, int]] = []
    for segment in dim.segments:
        if segment.axis is None:
            out += [("whole", 0)] * segment.size
            continue
        kind = "group" if segment.view == "kv" else "unit"
        for unit in range(segment.start, segment.stop):
            out += [(kind, unit)] * segment.size
    return out


sizes = st.integers(1, 5)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a busy machine
@given(st.integers(2, 4), st.integers(2, 4), st.lists(st.tuples(st.sampled_from("qkw"), sizes), min_size=1, max_size=5))
def test_sums_of_segments_are_read_back(groups: int, share: int, terms: list[tuple[str, int]]) -> None:
    heads = Heads("heads", groups * share, groups)
    dim = Dim(())
    expected: list[tuple[str, int]] = []
    for kind, size in terms:
        dim += {"q": heads.query(size), "k": heads.kv(size), "w": replicated(size)}[kind]
        name = {"q": "unit", "k": "group", "w": "whole"}[kind]
        if name == "whole" and expected and expected[-1][0] == "whole":
            expected[-1] = ("whole", expected[-1][1] + size)  # no label tells two whole runs apart
        else:
            expected.append((name, size))
    found = parts(labels_of(dim), groups * share, groups)
    assert found is not None
    assert [(part.kind, part.size) for part in found] == expected


@given(st.integers(2, 4), st.integers(2, 4), sizes, sizes)
def test_groups_stored_one_after_another_are_read_back(groups: int, share: int, query: int, kv: int) -> None:
    heads = Heads("heads", groups * share, groups)
    found = parts(labels_of(heads.grouped(query, kv, kv)), groups * share, groups)
    assert found is not None and [part.kind for part in found] == ["grouped"]
    assert found[0].inner == (("unit", query), ("group", 2 * kv))


@given(st.integers(2, 4), st.integers(2, 3), sizes)
def test_blocks_are_read_back(blocks: int, times: int, size: int) -> None:
    """CodeGen's order: in each block of heads q, v and k of them."""
    block = 3
    labels = [
        ("unit", at * block + unit)
        for at in range(blocks) for _ in range(times) for unit in range(block) for _ in range(size)
    ]  # fmt: skip
    found = parts(labels, blocks * block, blocks * block)
    assert found is not None
    assert [(p.kind, p.size, p.block, p.inner) for p in found] == [("blocks", size, block, (("unit", times),))]


@given(st.permutations(range(6)))
def test_an_order_that_no_table_says_is_refused(order: list[int]) -> None:
    labels = [("unit", unit) for unit in order]
    read = parts(labels, 6, 6)
    assert (read is not None) == (order == list(range(6)))


def test_one_unit_count_is_no_other() -> None:
    assert parts([("unit", n) for n in range(5)], 6, 6) is None
    assert parts(labels_of(Units("ffn", 6).each(2)), 6, 6) is not None


ONE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
       "intermediate_size": 160, "vocab_size": 320, "kv_lora_rank": 32, "qk_rope_head_dim": 8}  # fmt: skip
TWO = {"hidden_size": 96, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 32, "num_experts": 24,
       "intermediate_size": 240, "vocab_size": 480, "kv_lora_rank": 48, "qk_rope_head_dim": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ((64, 96), "hidden_size"),
        ((8, 16), "num_attention_heads"),
        ((8, 24), "num_experts"),
        ((8, 6), "hidden_size // num_attention_heads"),
        ((40, 80), "kv_lora_rank + qk_rope_head_dim"),
        ((320, 480), "2 * intermediate_size"),
        ((128, 512), "head_dim * num_attention_heads"),
        ((7, 7), "7"),
        ((13, 977), None),
    ],
)
def test_a_number_is_followed_to_its_key(values: tuple[int, ...], source: str | None) -> None:
    found = Numbers([ONE, TWO]).fit(values)
    if values == (320, 480):  # the vocabulary has that size, too: the plain key is the simpler word
        source = "vocab_size"
    assert (None if found is None else found.source) == source


@given(st.sampled_from(sorted(ONE)))
def test_every_expression_is_true_of_both_configs(key: str) -> None:
    found = Numbers([ONE, TWO]).fit((ONE[key] * 3, TWO[key] * 3))
    assert found is not None
    assert [eval(found.source, {}, config) for config in (ONE, TWO)] == [ONE[key] * 3, TWO[key] * 3]


def test_the_second_config_differs_wherever_the_model_allows() -> None:
    def runs(values: object) -> bool:
        config = dict(values)  # type: ignore[call-overload]
        return config["hidden_size"] % config["num_attention_heads"] == 0 and config["head_dim"] < 64

    found = varied(ONE | {"bos_token_id": 1, "num_hidden_layers": 2}, runs)
    assert runs(found) and found["num_hidden_layers"] == 2 and found["bos_token_id"] == 1
    assert all(found[key] != ONE[key] for key in ONE)


def test_sizes_that_only_go_together_are_changed_in_pairs() -> None:
    def runs(values: object) -> bool:
        config = dict(values)  # type: ignore[call-overload]
        return config["hidden_size"] * 2 == config["num_heads"] * config["head_dim"]

    start = {"hidden_size": 64, "num_heads": 8, "head_dim": 16}
    found = varied(start, runs)
    assert runs(found) and found != start


def test_what_is_no_size_is_known_by_its_name() -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 8, "text_config": {"head_dim": 4, "sliding_window": 8}}
    sizes = [path for path, value in numbers_in(config) if is_size(path, value)]
    assert sizes == [("hidden_size",), ("text_config", "head_dim")]


@given(st.integers(2, 300_000), st.integers(2, 300_000))
def test_every_size_can_be_another(hidden: int, vocabulary: int) -> None:
    """An odd one too, as a vocabulary's is: none is left out for want of a ratio."""
    start = {"hidden_size": hidden, "vocab_size": vocabulary}
    found = varied(start, lambda values: True)
    assert all(found[key] != start[key] and found[key] > 1 for key in start)
