"""Plans by static algebra: every real table passes at every degree, every wrong plan that algebra can see is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpshard.axes import Dim, Heads, Padded, Units, replicated
from tpshard.degrees import largest_degree
from tpshard.intervals import Run, Runs
from tpshard.partition import Partition, partition
from tpshard.plancuts import Planned
from tpshard.planrules import Judged, judge
from tpshard.registry import table_for
from tpshard.table import NEEDS_SUM, Table

Plan = dict[str, Planned]

LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6,
    "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 101, "attention_bias": True,
}  # fmt: skip
MHA = {"num_hidden_layers": 2, "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 24}
MLA = {
    "model_type": "deepseek_v3", **MHA, "moe_intermediate_size": 16, "n_routed_experts": 3, "q_lora_rank": 16,
    "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
FALCON = {"model_type": "falcon", "num_hidden_layers": 2, "vocab_size": 96, "hidden_size": 64, "num_attention_heads": 8}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 97, "n_positions": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "model_type": "qwen3"},
    "gemma3_text": {**LLAMA, "model_type": "gemma3_text"},
    "phi3": {**MHA, "model_type": "phi3", "num_key_value_heads": 4},
    "gpt_neox": {**MHA, "model_type": "gpt_neox"},
    "falcon-40b": {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    "falcon-7b": {**FALCON, "multi_query": True},
    "falcon-rw": {**FALCON, "multi_query": False, "bias": True, "parallel_attn": False},
    "gpt2": {**GPT, "model_type": "gpt2"},
    "gpt_bigcode": {**GPT, "model_type": "gpt_bigcode"},
    "opt": {
        **MHA, "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 64,
    },
    "olmo2": {**MHA, "model_type": "olmo2", "num_key_value_heads": 4},
    "mixtral": {**MHA, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 3},
    "qwen2_moe": {
        **MHA, "model_type": "qwen2_moe", "num_key_value_heads": 2, "num_experts": 3, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "deepseek_v3": MLA,
    "deepseek_v2": {**MLA, "model_type": "deepseek_v2", "q_lora_rank": None},
    "gpt_oss": {**MHA, "model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 3},
    "mamba2": {
        "model_type": "mamba2", "num_hidden_layers": 2, "vocab_size": 96, "hidden_size": 32, "num_heads": 8,
        "head_dim": 8, "state_size": 8, "n_groups": 2, "conv_kernel": 4, "use_bias": True,
    },
    "bert": {**MHA, "model_type": "bert", "max_position_embeddings": 64},
    "starcoder2": {**MHA, "model_type": "starcoder2", "num_key_value_heads": 2},
    "squeezebert": {**MHA, "model_type": "squeezebert", "max_position_embeddings": 64, "embedding_size": 32},
}  # fmt: skip
SQUEEZED = Units("ffn", 6, noun="feed-forward channels of every group")


def names(table: Table, pattern: str) -> Iterator[str]:
    pattern = pattern.replace("@", table.prefixes[0], 1)
    for layer in range(table.layers + table.extra_layers if "{layer}" in pattern else 1):
        for expert in range(table.experts if "{expert}" in pattern else 1):
            yield pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def plan_of(config: dict[str, Any], tp_size: int) -> Plan:
    """All tensors that the table has rules for, optional ones too; no weights."""
    table = table_for(config)
    out = {}
    for rule in table.rules:
        if None in rule.dims:
            continue
        dims = tuple(dim if isinstance(dim, Dim) else replicated(dim or 0) for dim in rule.dims)
        shape = tuple(dim.extent for dim in dims)
        parts = tuple(partition(dim, tp_size) for dim in dims)
        for name in names(table, rule.name):
            out[name] = Planned(name, shape, rule.role, rule.note, dims, parts)
    return out


def messages(plan: Plan, tp_size: int, **more: Any) -> list[str]:
    return [finding.message for finding in judge(plan, tp_size, more.get("aliases", {})).findings]


def cut(plan: Plan, ending: str, runs: Callable[[int, Runs], list[tuple[int, int]]], number: int = 0) -> None:
    """Give the ranks other runs of dimension ``number`` of every tensor that ends so."""
    for name, tensor in plan.items():
        if name.endswith(ending):
            part = tensor.parts[number]
            held = [runs(rank, old) for rank, old in enumerate(part.ranks)]
            ranks = tuple(tuple(Run(start, stop - start) for start, stop in of_rank) for of_rank in held)
            parts = list(tensor.parts)
            parts[number] = Partition(part.extent, ranks)
            plan[name] = tensor._replace(parts=tuple(parts))


def retabled(plan: Plan, ending: str, tp_size: int, *dims: Dim, **changes: Any) -> None:
    """Cut every tensor that ends so by other dimensions, as a wrong table would."""
    for name, tensor in plan.items():
        if name.endswith(ending):
            parts = tuple(partition(dim, tp_size) for dim in dims)
            plan[name] = tensor._replace(dims=dims, parts=parts, **changes)


@pytest.mark.parametrize("family", CONFIGS)
def test_real_tables_pass_at_every_degree(family: str) -> None:
    table = table_for(CONFIGS[family])
    for tp_size in range(1, min(8, largest_degree(table.axes)) + 1):
        judged = judge(plan_of(CONFIGS[family], tp_size), tp_size, {})
        assert judged.findings == [], (tp_size, judged.findings)
        assert judged.unjudged == []
        assert sum(judged.parts.values()) >= 4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 37), st.integers(1, 200), st.integers(1, 12))
def test_any_sizes_pass_at_any_degree(kv: int, group: int, ffn: int, vocab: int, tp_size: int) -> None:
    config = {
        **LLAMA, "num_key_value_heads": kv, "num_attention_heads": kv * group, "intermediate_size": ffn,
        "vocab_size": vocab,
    }  # fmt: skip
    tp_size = min(tp_size, largest_degree(table_for(config).axes))
    assert messages(plan_of(config, tp_size), tp_size) == []


def test_what_is_judged_is_counted() -> None:
    judged: Judged = judge(plan_of(CONFIGS["mixtral"], 2), 2, {})
    # mixtral's table knows experts stored apart and stacked: 2 layers x (3 + 1)
    assert judged.parts == {"attention parts": 2, "experts parts": 8, "vocabulary tables": 2}
    assert judged.layers["all_reduce"] == 5 and judged.layers["all_gather"] == 1
    assert judge(plan_of(CONFIGS["olmo2"], 2), 2, {}).layers["norm_all_reduce"] == 4
    assert judge({}, 2, {}).parts == {}


# -- wrong plans: the bytes agree with each, so no level before this one sees them --------------------


def strided(unit: int, tp_size: int, count: int) -> Callable[[int, Runs], list[tuple[int, int]]]:
    return lambda rank, old: [(h * unit, (h + 1) * unit) for h in range(rank, count, tp_size)]


def reversed_units(unit: int) -> Callable[[int, Runs], list[tuple[int, int]]]:
    def runs(rank: int, old: Runs) -> list[tuple[int, int]]:
        starts = [at for run in old for at in range(run.start, run.start + run.length, unit)]
        return [(at, at + unit) for at in reversed(starts)]

    return runs


def kv_modulo(plan: Plan) -> None:
    for ending in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
        cut(plan, ending, lambda rank, old: [(rank % 4 * 6, rank % 4 * 6 + 6)])


def q_strided(plan: Plan) -> None:
    cut(plan, "q_proj.weight", strided(6, 4, 8))


def q_reversed(plan: Plan) -> None:
    cut(plan, "q_proj.weight", reversed_units(6))


def kv_reversed(plan: Plan) -> None:
    for ending in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
        cut(plan, ending, reversed_units(6))


def gate_off_by_one(plan: Plan) -> None:
    ranges = {0: [(1, 11)], 1: [(11, 21)], 2: [(21, 31)], 3: [(31, 40), (0, 1)]}
    cut(plan, "gate_proj.weight", lambda rank, old: ranges[rank])


def half_kv_heads(plan: Plan) -> None:
    for ending in ("k_proj.weight", "v_proj.weight"):
        cut(plan, ending, lambda rank, old: [(rank * 3, rank * 3 + 3)])


def one_and_a_half_heads(plan: Plan) -> None:
    for ending, number in (("q_proj.weight", 0), ("k_proj.weight", 0), ("v_proj.weight", 0), ("o_proj.weight", 1)):
        cut(plan, ending, lambda rank, old: [(rank * 9, rank * 9 + 9)], number)


def vocabulary_overlaps(plan: Plan) -> None:
    cut(plan, "embed_tokens.weight", lambda rank, old: [(rank * 25 - (rank == 1), rank * 25 + 25)])


def vocabulary_has_a_hole(plan: Plan) -> None:
    cut(plan, "embed_tokens.weight", lambda rank, old: [(rank * 25 + (rank == 1), rank * 25 + 25)])


def q_cut_on_its_input(plan: Plan) -> None:
    heads = Heads("heads", 8, 4)
    retabled(plan, "q_proj.weight", 4, replicated(48), heads.query(6))


def down_replicated(plan: Plan) -> None:
    retabled(plan, "down_proj.weight", 4, replicated(48), replicated(40))


def row_bias_everywhere(plan: Plan) -> None:
    for name, tensor in plan.items():
        if name.endswith("dense.bias"):
            plan[name] = tensor._replace(note="")


def gate_up_contiguous(plan: Plan) -> None:
    cut(plan, "gate_up_proj.weight", lambda rank, old: [(rank * 12, rank * 12 + 12)])


def gate_up_contiguous_by_table(plan: Plan) -> None:
    retabled(plan, "gate_up_proj.weight", 4, Units("ffn", 48).each(), replicated(32))


def qkv_contiguous(plan: Plan) -> None:
    cut(plan, "qkv_proj.weight", lambda rank, old: [(rank * 16, rank * 16 + 16)])


def kqv(plan: Plan) -> None:
    cut(plan, "qkv_proj.weight", lambda rank, old: [(old[i].start, old[i].start + old[i].length) for i in (1, 0, 2)])


def norm_not_summed(plan: Plan) -> None:
    for name, tensor in plan.items():
        if tensor.note == NEEDS_SUM:
            plan[name] = tensor._replace(note="")


def norm_left_whole(plan: Plan) -> None:
    retabled(plan, "q_norm.weight", 4, replicated(32), note="")


def norm_between_v_and_o(plan: Plan) -> None:
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.attn_sub_norm.weight"
        whole = replicated(48)
        plan[name] = Planned(name, (48,), "norm", "", (whole,), (partition(whole, 4),))


def mqa_qkv_in_blocks_of_rows(plan: Plan) -> None:
    cut(plan, "query_key_value.weight", lambda rank, old: [(rank * 20, rank * 20 + 20)])


def q_in_halves(plan: Plan) -> None:
    retabled(plan, "q_proj.weight", 4, Heads("heads", 8, 4).query(3) * 2, replicated(48))


def k_in_halves(plan: Plan) -> None:
    retabled(plan, "k_proj.weight", 4, Heads("heads", 8, 4).kv(3) * 2, replicated(48))


def v_in_halves(plan: Plan) -> None:
    retabled(plan, "v_proj.weight", 4, Heads("heads", 8, 4).kv(3) * 2, replicated(48))


def head_along_its_own_axis(plan: Plan) -> None:
    retabled(plan, "lm_head.weight", 4, Padded("rows of the head", 101).each(), replicated(48))


def head_along_the_channels(plan: Plan) -> None:
    retabled(plan, "lm_head.weight", 4, Units("ffn", 40, noun="feed-forward channels").each(), replicated(48))


def groups_forgotten(plan: Plan) -> None:
    retabled(plan, "intermediate.conv1d.weight", 2, SQUEEZED.each(4), replicated(8), replicated(1))


def groups_of_another_number(plan: Plan) -> None:
    retabled(plan, "intermediate.conv1d.weight", 2, SQUEEZED.each(2) * 2, replicated(8), replicated(1))


def second_output_in_another_order(plan: Plan) -> None:
    for name in [name for name in plan if name.endswith("o_proj.weight")]:
        second = name.replace("o_proj", "second_proj")
        plan[second] = plan[name]._replace(name=second)
        cut(plan, second, reversed_units(6), 1)


def second_output_whole(plan: Plan) -> None:
    for name in [name for name in plan if name.endswith("o_proj.weight")]:
        second = name.replace("o_proj", "second_proj")
        plan[second] = plan[name]._replace(name=second)
        retabled(plan, second, 4, replicated(48), replicated(48))


WRONG: list[tuple[Callable[[Plan], None], str, dict[str, Any], int, str]] = [
    (kv_modulo, "llama", {}, 8, "meet kv heads"),
    (q_strided, "llama", {"num_key_value_heads": 8}, 4, "query heads 0:1 4:5"),
    (q_reversed, "llama", {}, 4, "query heads 1:2 0:1"),
    (kv_reversed, "llama", {"num_key_value_heads": 8}, 4, "belongs to"),
    (gate_off_by_one, "llama", {}, 4, "gate_proj.weight: rank 0 holds feed-forward channels 1:11"),
    (half_kv_heads, "llama", {}, 8, "holds a part of a unit"),
    (one_and_a_half_heads, "llama", {"num_attention_heads": 6, "num_key_value_heads": 6}, 4, "holds a part of a unit"),
    (vocabulary_overlaps, "llama", {"vocab_size": 100}, 4, "24 is on rank 0 and again on rank 1"),
    (vocabulary_has_a_hole, "llama", {"vocab_size": 100}, 4, "25:26 of dimension 0 are on no rank"),
    (q_cut_on_its_input, "llama", {}, 4, "same side"),
    (down_replicated, "llama", {}, 4, "4 times too large"),
    (row_bias_everywhere, "gpt_neox", {}, 4, "nothing says that it is added once"),
    (gate_up_contiguous, "phi3", {}, 4, "gate_up_proj.weight"),
    (gate_up_contiguous_by_table, "phi3", {}, 4, "is cut along"),
    (qkv_contiguous, "phi3", {}, 4, "qkv_proj.weight"),
    (kqv, "phi3", {}, 4, "in another order than the tensor has them"),
    (norm_not_summed, "olmo2", {}, 4, "nothing says that it needs a sum"),
    (norm_left_whole, "olmo2", {}, 4, "must be cut along, and its statistics summed"),
    (norm_between_v_and_o, "llama", {}, 4, "must be cut along, and its statistics summed"),
    (mqa_qkv_in_blocks_of_rows, "falcon-7b", {}, 4, "query_key_value.weight"),
    (q_in_halves, "llama", {}, 4, "heads are in pairs in all of q, k and v, or in none"),
    (k_in_halves, "llama", {}, 4, "heads are in pairs in all of q, k and v, or in none"),
    (v_in_halves, "llama", {}, 4, "heads are in pairs in all of q, k and v, or in none"),
    (head_along_its_own_axis, "llama", {}, 4, "of as many rows, along"),
    (head_along_the_channels, "llama", {"vocab_size": 40}, 4, "an axis of layers and no vocabulary"),
    (groups_forgotten, "squeezebert", {}, 2, "holds 1 runs of feed-forward channels"),
    (groups_of_another_number, "squeezebert", {}, 2, "holds 2 runs of feed-forward channels"),
    (second_output_in_another_order, "llama", {}, 4, "second_proj.weight: rank 0 holds query heads 1:2 0:1"),
    (second_output_whole, "llama", {}, 4, "second_proj.weight is whole on every rank"),
]


@pytest.mark.parametrize(("wrong", "family", "sizes", "tp_size", "said"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_wrong_plans_are_named(
    wrong: Callable[[Plan], None], family: str, sizes: dict[str, Any], tp_size: int, said: str
) -> None:
    plan = plan_of({**CONFIGS[family], **sizes}, tp_size)
    assert messages(plan, tp_size) == []
    wrong(plan)
    found = messages(plan, tp_size)
    assert any(said in message for message in found), found


def test_whole_heads_permuted_alike_are_a_valid_plan() -> None:
    plan = plan_of({**LLAMA, "num_key_value_heads": 8}, 4)
    for ending, number in (
        ("q_proj.weight", 0), ("k_proj.weight", 0), ("v_proj.weight", 0), ("o_proj.weight", 1),
        ("q_proj.bias", 0), ("k_proj.bias", 0), ("v_proj.bias", 0),
    ):  # fmt: skip
        cut(plan, ending, strided(6, 4, 8), number)
    assert messages(plan, 4) == []


def test_a_fault_in_every_layer_is_said_once_and_one_in_one_layer_names_it() -> None:
    plan = plan_of({**LLAMA, "num_hidden_layers": 7}, 4)
    cut(plan, "q_proj.weight", strided(6, 4, 8))
    (message,) = messages(plan, 4)
    assert "model.layers.0." in message and "(and 6 more like it, to model.layers.6." in message
    plan = plan_of({**LLAMA, "num_hidden_layers": 7}, 4)
    cut(plan, "layers.5.self_attn.q_proj.weight", strided(6, 4, 8))
    (message,) = messages(plan, 4)
    assert "model.layers.5.self_attn.q_proj.weight" in message and "layers.5.self_attn.o_proj" in message


def without_first(rank: int, old: Runs) -> list[tuple[int, int]]:
    return [(run.start + (rank == 1), run.start + run.length) for run in old if run.start >= 0]


@pytest.mark.parametrize("family", ["llama", "phi3", "mamba2", "gpt_oss", "deepseek_v3", "gpt2", "olmo2", "falcon-40b"])
def test_taking_one_unit_from_any_rank_of_any_cut_tensor_is_seen(family: str) -> None:
    """Every tensor that is cut is judged: none can lose an index, or take a neighbour's, unseen."""
    for name in plan_of(CONFIGS[family], 2):
        plan = plan_of(CONFIGS[family], 2)
        tensor = plan[name]
        for number, part in enumerate(tensor.parts):
            if part.is_whole:
                continue
            cut(plan, name, without_first, number)
            assert messages(plan, 2), name


@pytest.mark.parametrize("family", ["llama", "mamba2", "gpt_oss", "deepseek_v3", "olmo2"])
def test_exchanging_two_ranks_of_any_cut_tensor_is_seen(family: str) -> None:
    for name in plan_of(CONFIGS[family], 2):
        plan = plan_of(CONFIGS[family], 2)
        tensor = plan[name]
        if all(part.is_whole for part in tensor.parts):
            continue
        parts = tuple(Partition(p.extent, p.ranks[::-1]) if not p.is_whole else p for p in tensor.parts)
        plan[name] = tensor._replace(parts=parts)
        assert messages(plan, 2), name


def test_a_rank_that_lacks_a_whole_tensor_is_seen() -> None:
    plan = plan_of(LLAMA, 4)
    cut(plan, "layers.0.input_layernorm.weight", lambda rank, old: [(0, 48)] if rank else [])
    assert any("input_layernorm" in message for message in messages(plan, 4))


def test_tied_tables() -> None:
    plan = plan_of(LLAMA, 4)
    assert messages(plan, 4, aliases={"lm_head.weight": "model.embed_tokens.weight"}) == []
    del plan["lm_head.weight"]
    assert messages(plan, 4, aliases={"lm_head.weight": "model.embed_tokens.weight"}) == []
    assert "is tied to it" in messages(plan, 4, aliases={"lm_head.weight": "gone.weight"})[0]


def test_runs_that_are_stored_twice_or_beyond_the_end() -> None:
    plan = plan_of(LLAMA, 4)
    cut(plan, "layers.0.mlp.gate_proj.weight", lambda rank, old: [(0, 10), (5, 10)] if rank == 2 else [(0, 50)])
    assert any("twice" in message or "which has" in message for message in messages(plan, 4))


def test_experts_dealt_to_ranks() -> None:
    """Whole experts on ranks: the banks must hold the same ones."""
    config = {**CONFIGS["gpt_oss"], "num_local_experts": 4}
    dealt = Units("experts", 4).each()
    plan = plan_of(config, 2)
    for ending, rest in (
        ("gate_up_proj", (32, 48)), ("gate_up_proj_bias", (48,)), ("down_proj", (24, 32)), ("down_proj_bias", (32,)),
    ):  # fmt: skip
        for name, tensor in plan.items():
            if name.endswith(f"experts.{ending}"):
                dims = (dealt, *map(replicated, rest))
                parts = tuple(partition(dim, 2) for dim in dims)
                plan[name] = tensor._replace(shape=(4, *rest), dims=dims, parts=parts, note="")
    assert messages(plan, 2) == []
    cut(plan, "layers.1.mlp.experts.down_proj", lambda rank, old: [(2 - 2 * rank, 4 - 2 * rank)])
    assert any("other experts" in message for message in messages(plan, 2))


@st.composite
def mangled(draw: st.DrawFn) -> tuple[Plan, int]:
    """A plan of any family in which some tensors have any role, note, dimensions or runs at all."""
    tp_size = draw(st.integers(1, 4))
    plan = plan_of(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))], tp_size)
    names = sorted(plan)
    roles = sorted({tensor.role for tensor in plan.values()} | {"unknown", "", "_bias", "expert_down_bias"})
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=6, unique=True)):
        tensor = plan[name]
        what = draw(st.sampled_from(["role", "note", "runs", "other", "gone"]))
        if what == "role":
            plan[name] = tensor._replace(role=draw(st.sampled_from(roles)))
        elif what == "note":
            plan[name] = tensor._replace(note=draw(st.sampled_from([NEEDS_SUM, "added {once}", ""])))
        elif what == "other":
            other = plan[draw(st.sampled_from(sorted(plan)))]
            plan[name] = tensor._replace(dims=other.dims, parts=other.parts, shape=other.shape)
        elif what == "gone":
            del plan[name]
        else:
            run = st.builds(Run, st.integers(-1, 70), st.integers(0, 70))
            ranks = st.lists(st.lists(run, max_size=4).map(tuple), min_size=tp_size, max_size=tp_size)
            parts = tuple(Partition(part.extent, tuple(draw(ranks))) for part in tensor.parts)
            plan[name] = tensor._replace(parts=parts)
    return plan, tp_size


@settings(max_examples=300, deadline=None)
@given(mangled())
def test_no_plan_however_wrong_ends_in_an_exception(found: tuple[Plan, int]) -> None:
    plan, tp_size = found
    for finding in judge(plan, tp_size, {}).findings:
        assert finding.tensor and finding.message and "\0" not in finding.message
