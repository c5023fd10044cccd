"""Tables of mixtures of experts: which rows a rank holds, the forms that released files have, and names that lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tpshard.axes import Dim
from tpshard.errors import DamagedError, TpshardError, UnsupportedError
from tpshard.matching import Logical, Matched, match
from tpshard.partition import partition
from tpshard.registry import table_for
from tpshard.table import ADDED_ONCE, NEEDS_SUM, Rule, Table, placed, rule_template, template_of

BASE = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 10}
WIDE = {**BASE, "intermediate_size": 14}
MIXED = {**WIDE, "moe_intermediate_size": 10}
ALONE = {**BASE, "moe_intermediate_size": 10}  # every layer has experts
SPARSE = ["dense", "sparse"]
CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {**MIXED, "head_dim": 8, "num_experts": 3, "num_dense_layers": 1, "num_shared_experts": 2},
    "aria_text": {**WIDE, "head_dim": 8, "moe_num_experts": 3, "moe_num_shared_experts": 2},
    "beam": {**MIXED, "head_dim": 8, "num_experts": 3, "mlp_layer_types": SPARSE},
    "cohere2_moe": {**WIDE, "head_dim": 8, "num_experts": 3, "mlp_layer_types": SPARSE, "num_shared_experts": 2,
                    "prefix_dense_intermediate_size": 16},
    "dbrx": {"d_model": 24, "n_heads": 4, "n_layers": 2, "vocab_size": 10, "attn_config": {"kv_n_heads": 2},
             "ffn_config": {"ffn_hidden_size": 10, "moe_num_experts": 3}},
    "dots1": {**MIXED, "n_routed_experts": 3, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "ernie4_5_moe": {**MIXED, "moe_num_experts": 3, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "exaone_moe": {**MIXED, "num_experts": 3, "mlp_layer_types": SPARSE},
    "flex_olmo": {**WIDE, "num_experts": 3},
    "flint": {**MIXED, "head_dim": 8, "num_experts": 3, "mlp_only_layers": [0], "shared_expert_intermediate_size": 6},
    "glm4_moe": {**MIXED, "n_routed_experts": 3, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    "granitemoe": {**WIDE, "num_local_experts": 3},
    "granitemoe_swa": {**WIDE, "num_local_experts": 3, "shared_intermediate_size": 6},
    "granitemoeshared": {**WIDE, "num_local_experts": 3, "shared_intermediate_size": 6},
    "hunyuan_v1_moe": {**WIDE, "head_dim": 8, "num_experts": 3},
    "hy_v3": {**MIXED, "head_dim": 8, "num_experts": 3, "mlp_layer_types": SPARSE, "num_nextn_predict_layers": 1},
    "jetmoe": {**WIDE, "kv_channels": 8, "num_local_experts": 3},
    "kolibri1": {**ALONE, "head_dim": 8, "num_local_experts": 3, "shared_expert_intermediate_size": 6},
    "laguna": {**MIXED, "head_dim": 8, "num_experts": 3, "mlp_layer_types": SPARSE,
               "shared_expert_intermediate_size": 6, "num_attention_heads_per_layer": [4, 6]},
    "llama4_text": {**WIDE, "head_dim": 8, "num_local_experts": 3, "intermediate_size_mlp": 16, "moe_layers": [1]},
    "mellum": {**MIXED, "head_dim": 8, "num_local_experts": 3, "mlp_layer_types": SPARSE},
    "mimo_v2_flash": {**MIXED, "head_dim": 8, "v_head_dim": 6, "n_routed_experts": 3, "mlp_layer_types": SPARSE,
                      "layer_types": ["full_attention", "sliding_attention"]},
    "minimax_m2": {**WIDE, "head_dim": 8, "num_local_experts": 3},
    "minimax_m3_vl_text": {**WIDE, "head_dim": 8, "num_local_experts": 3, "dense_intermediate_size": 16,
                           "shared_intermediate_size": 6, "mlp_layer_types": SPARSE, "index_n_heads": 2,
                           "index_head_dim": 4, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mixtral": {**WIDE, "num_local_experts": 3},
    "olmoe": {**WIDE, "num_experts": 3},
    "phimoe": {**WIDE, "num_local_experts": 3},
    "qwen2_moe": {**MIXED, "num_experts": 3, "shared_expert_intermediate_size": 6, "mlp_only_layers": [0]},
    "qwen3_moe": {**MIXED, "head_dim": 8, "num_experts": 3, "mlp_only_layers": [0]},
    "qwen3_vl_moe_text": {**ALONE, "head_dim": 8, "num_experts": 3},
    "sarvam_moe": {**MIXED, "head_dim": 8, "num_experts": 3, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "solar_open": {**ALONE, "head_dim": 8, "n_routed_experts": 3},
    "ernie4_5_vl_moe_text": {**WIDE, "moe_num_experts": 2, "moe_intermediate_size": [10, 6]},
    "zaya": {**ALONE, "head_dim": 8, "num_experts": 3, "router_hidden_size": 6, "cca_time0": 2, "cca_time1": 3},
}  # fmt: skip


def config(model_type: str, **changed: Any) -> dict[str, Any]:
    return {**CONFIGS[model_type], "model_type": model_type, **changed}


def table(model_type: str, **changed: Any) -> Table:
    return table_for(config(model_type, **changed))


def rule_of(of: Table, name: str) -> Rule:
    """The rule that a tensor of this name falls under, whatever the prefix."""
    template, numbers = template_of(name)
    for rule in of.rules:
        for pair in of.stacks[rule.stack].pairs:
            places = [part for part in placed(rule.name, pair).split(".") if part.isdigit() or part.startswith("{")]
            if rule_template(placed(rule.name, pair)) == template and all(
                int(place) == n if place.isdigit() else place != "{layer}" or rule.layers is None or n in rule.layers
                for place, n in zip(places, numbers, strict=True)
            ):
                return rule
    raise AssertionError(f"no rule for {name}")


def rows(of: Table, name: str, dimension: int, tp_size: int) -> list[list[tuple[int, int]]]:
    """The intervals of a dimension that every rank holds."""
    dim = rule_of(of, name).dims[dimension]
    assert isinstance(dim, Dim)
    return [[(run.start, run.start + run.length) for run in runs] for runs in partition(dim, tp_size).ranks]


LAYER = "model.layers.1"
EXACT: dict[str, tuple[str, str, int, list[list[tuple[int, int]]]]] = {
    # model type, tensor, dimension, intervals of rank 0 and of rank 1
    "flat banks: inside every expert": (
        "dbrx", "transformer.blocks.0.ffn.experts.mlp.w1", 0,
        [[(0, 5), (10, 15), (20, 25)], [(5, 10), (15, 20), (25, 30)]],
    ),
    "flat banks, stored input x output": (
        "dbrx", "transformer.blocks.0.ffn.experts.mlp.w2", 0,
        [[(0, 5), (10, 15), (20, 25)], [(5, 10), (15, 20), (25, 30)]],
    ),
    "queries, keys, values": (
        "sarvam_moe", f"{LAYER}.attention.query_key_value.weight", 0,
        [[(0, 16), (32, 40), (48, 56)], [(16, 32), (40, 48), (56, 64)]],
    ),
    "keys, values": ("jetmoe", f"{LAYER}.self_attention.kv_proj.weight", 0, [[(0, 8), (16, 24)], [(8, 16), (24, 32)]]),
    "queries of attention experts": ("jetmoe", f"{LAYER}.self_attention.experts.input_linear.weight", 1,
                                     [[(0, 8)], [(8, 16)]]),
    "gate and up, the last dimension": ("llama4_text", f"{LAYER}.feed_forward.experts.gate_up_proj", 2,
                                        [[(0, 7), (14, 21)], [(7, 14), (21, 28)]]),
    "gate and up of fc1": ("aria_text", f"{LAYER}.mlp.experts.fc1.weight", 2,
                           [[(0, 7), (14, 21)], [(7, 14), (21, 28)]]),
    "gate and up, dimension 1": ("granitemoe", f"{LAYER}.block_sparse_moe.input_linear.weight", 1,
                                 [[(0, 7), (14, 21)], [(7, 14), (21, 28)]]),
    "a shared MLP with both in one": ("granitemoe_swa", f"{LAYER}.shared_mlp.input_linear.weight", 0,
                                      [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]),
    "four heads in layer 0": ("laguna", "model.layers.0.self_attn.q_proj.weight", 0, [[(0, 16)], [(16, 32)]]),
    "six heads in layer 1": ("laguna", f"{LAYER}.self_attn.q_proj.weight", 0, [[(0, 24)], [(24, 48)]]),
    "a gate a head": ("laguna", f"{LAYER}.self_attn.g_proj.weight", 0, [[(0, 3)], [(3, 6)]]),
    "narrow values": ("mimo_v2_flash", "model.layers.0.self_attn.v_proj.weight", 0, [[(0, 6)], [(6, 12)]]),
    "twice the KV heads behind a window": ("mimo_v2_flash", f"{LAYER}.self_attn.v_proj.weight", 0,
                                           [[(0, 12)], [(12, 24)]]),
    "outputs as narrow as values": ("mimo_v2_flash", f"{LAYER}.self_attn.o_proj.weight", 1, [[(0, 12)], [(12, 24)]]),
    "sinks": ("mimo_v2_flash", f"{LAYER}.self_attn.attention_sink_bias", 0, [[(0, 2)], [(2, 4)]]),
    "a gate's bias, one a head": ("beam", f"{LAYER}.self_attn.gate_bias", 0, [[(0, 2)], [(2, 4)]]),
    "a gate's rows": ("afmoe", f"{LAYER}.self_attn.gate_proj.weight", 0, [[(0, 16)], [(16, 32)]]),
    "the first half of all values": ("zaya", f"{LAYER}.self_attn.qkv_proj.v_proj_current.weight", 0, [[(0, 8)], []]),
    "the other half": ("zaya", f"{LAYER}.self_attn.qkv_proj.v_proj_delayed.weight", 0, [[], [(0, 8)]]),
    "convolutions over queries and keys": ("zaya", f"{LAYER}.self_attn.qkv_proj.conv_qk_grouped.weight", 0,
                                           [[(0, 16), (32, 40)], [(16, 32), (40, 48)]]),
    "experts for text": ("ernie4_5_vl_moe_text", f"{LAYER}.mlp.experts.1.gate_proj.weight", 0, [[(0, 5)], [(5, 10)]]),
    "experts for patches": ("ernie4_5_vl_moe_text", f"{LAYER}.mlp.experts.2.gate_proj.weight", 0, [[(0, 3)], [(3, 6)]]),
    "a norm over all heads": ("minimax_m2", f"{LAYER}.self_attn.q_norm.weight", 0, [[(0, 16)], [(16, 32)]]),
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_the_rows_that_a_rank_holds(case: str) -> None:
    model_type, name, dimension, expected = EXACT[case]
    assert rows(table(model_type), name, dimension, 2) == expected


@pytest.mark.parametrize("model_type", ["olmoe", "flex_olmo", "minimax_m2"])
def test_norms_over_all_heads_need_a_sum(model_type: str) -> None:
    for name in ("q_norm", "k_norm"):
        assert rule_of(table(model_type), f"{LAYER}.self_attn.{name}.weight").note == NEEDS_SUM


@pytest.mark.parametrize(
    "model_type", ["afmoe", "beam", "dots1", "exaone_moe", "flint", "kolibri1", "laguna", "mellum"]
)
def test_norms_of_one_head_are_whole(model_type: str) -> None:
    of = table(model_type)
    assert all(not isinstance(dim, Dim) for dim in rule_of(of, f"{LAYER}.self_attn.q_norm.weight").dims)


def test_biases_after_the_sum_are_added_once() -> None:
    of = table("ernie4_5_moe", use_bias=True)
    for name in ("self_attn.o_proj", "mlp.shared_experts.down_proj"):
        assert rule_of(of, f"{LAYER}.{name}.bias").note == ADDED_ONCE
    assert isinstance(rule_of(of, f"{LAYER}.self_attn.q_proj.bias").dims[0], Dim)


@pytest.mark.parametrize("heads, parts", [(2, 2), (4, 4), (1, 1)])
def test_zaya_is_cut_by_groups_and_held_whole_beyond(heads: int, parts: int) -> None:
    of = table("zaya", num_key_value_heads=heads)
    (axis,) = {a for a in of.axes if a.name == "heads"}
    assert axis.parts() == parts and axis.serves(64) and axis.is_whole(parts + 1)


def tensors(of: Table, *, without: tuple[str, ...] = (), pair: int = 0, either: bool = False) -> Iterator[Logical]:
    """All that a table asks for, of the blocks that are not left out, under one of its prefixes."""
    for rule in of.rules:
        if rule.block in without or rule.optional:
            continue
        stack = of.stacks[rule.stack]
        layers = range(stack.layers + stack.extra_layers) if "{layer}" in rule.name else range(1)
        shape = [dim.extent if isinstance(dim, Dim) else dim for dim in rule.dims]
        if either and rule.either_way:
            shape[-2:] = shape[:-3:-1]
        for layer in layers:
            if rule.layers is not None and layer not in rule.layers:
                continue
            if rule.block == "prediction" and layer < stack.layers:
                continue
            for expert in range(stack.experts) if "{expert}" in rule.name else range(1):
                name = placed(rule.name, stack.pairs[pair]).replace("{layer}", str(layer))
                yield Logical(name.replace("{expert}", str(expert)), "F32", tuple(map(int, shape)))


FORMS = sorted(
    {
        (model_type, block)
        for model_type in CONFIGS
        for choice in table(model_type).choices
        for block in choice.blocks
    }
)


def others(of: Table, block: str) -> tuple[str, ...]:
    """Of every choice that the block is in, the other blocks; of every other choice all but the first."""
    out: set[str] = set()
    for choice in of.choices:
        kept = block if block in choice.blocks else choice.blocks[0]
        out |= set(choice.blocks) - {kept}
    return tuple(out - {block})


@pytest.mark.parametrize("model_type, block", FORMS)
def test_every_released_form_is_taken_and_is_taken_alone(model_type: str, block: str) -> None:
    of = table(model_type)
    left_out = others(of, block)
    for pair in range(len(of.prefixes)):
        kept = list(tensors(of, without=left_out, pair=pair))
        assert set(match(of, kept).dims) == {tensor.name for tensor in kept}
    alternatives = next(choice.blocks for choice in of.choices if block in choice.blocks)
    both = list(tensors(of, without=tuple(set(left_out) - set(alternatives))))
    with pytest.raises(DamagedError, match="only one"):
        match(of, both)
    with pytest.raises(DamagedError):
        match(of, tensors(of, without=(*left_out, block)))


HUB = {  # names that released files have, one a family and form
    ("afmoe", "experts"): (f"{LAYER}.mlp.router.gate.weight", f"{LAYER}.mlp.expert_bias"),
    ("aria_text", "experts"): (f"{LAYER}.mlp.experts.fc1.weight",),
    ("exaone_moe", "experts"): (f"{LAYER}.mlp.e_score_correction_bias",),
    ("flint", "experts"): (f"{LAYER}.self_attn.softmax_offset",),
    ("granitemoe", "experts"): (f"{LAYER}.block_sparse_moe.input_linear.weight",),
    ("granitemoe", "experts, as transformers names them"): (f"{LAYER}.block_sparse_moe.experts.gate_up_proj",),
    ("hunyuan_v1_moe", "experts"): (f"{LAYER}.mlp.gate.wg.weight", f"{LAYER}.mlp.shared_mlp.up_proj.weight"),
    ("kolibri1", "experts"): (f"{LAYER}.moe.router.expert_bias", f"{LAYER}.post_ffn_norm.weight"),
    ("laguna", "experts"): (f"{LAYER}.mlp.experts.e_score_correction_bias",),
    ("minimax_m2", "experts"): (f"{LAYER}.block_sparse_moe.experts.2.w3.weight",),
    ("minimax_m2", "stacked experts"): (f"{LAYER}.mlp.experts.down_proj", f"{LAYER}.mlp.e_score_correction_bias"),
    ("minimax_m3_vl_text", "experts"): (f"{LAYER}.block_sparse_moe.shared_experts.gate_proj.weight",),
    ("minimax_m3_vl_text", "index"): (f"{LAYER}.self_attn.index_q_proj.weight",),
    ("mixtral", "experts"): (f"{LAYER}.block_sparse_moe.experts.2.w1.weight",),
    ("mixtral", "stacked experts"): (f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.gate.weight"),
    ("phimoe", "stacked experts"): (f"{LAYER}.mlp.router.weight",),
    ("qwen3_moe", "experts"): (f"{LAYER}.mlp.experts.2.gate_proj.weight",),
    ("qwen3_moe", "stacked experts"): (f"{LAYER}.mlp.experts.gate_up_proj",),
    ("sarvam_moe", "experts"): (f"{LAYER}.attention.dense.weight", "model.word_embeddings.weight"),
}  # fmt: skip


@pytest.mark.parametrize("model_type, block", HUB)
def test_the_names_of_released_files(model_type: str, block: str) -> None:
    of = table(model_type)
    names = {tensor.name for tensor in tensors(of, without=others(of, block))}
    assert names >= set(HUB[model_type, block])


@pytest.mark.parametrize("model_type, older, newer", [
    ("qwen3_moe", "num_experts", "num_local_experts"), ("mixtral", "num_local_experts", "num_experts"),
    ("dots1", "n_routed_experts", "num_local_experts"), ("sarvam_moe", "num_experts", "n_routed_experts"),
    ("minimax_m2", "num_local_experts", "num_experts"), ("mellum", "num_local_experts", "num_experts"),
])  # fmt: skip
def test_other_spellings_of_the_number_of_experts(model_type: str, older: str, newer: str) -> None:
    values = config(model_type)
    values[newer] = values.pop(older)
    assert table_for(values).rules == table(model_type).rules


@pytest.mark.parametrize("either", [False, True])
def test_qwen3_vl_stores_experts_either_way(either: bool) -> None:
    of = table("qwen3_vl_moe_text")
    found = match(of, tensors(of, without=("experts",), either=either))
    dims = found.dims_of(f"{LAYER}.mlp.experts.gate_up_proj")
    assert [bool(dim.axes) for dim in dims] == ([False, False, True] if either else [False, True, False])


@pytest.mark.parametrize("model_type", ["glm4_moe", "hy_v3"])
def test_layers_that_predict_may_be_left_out_but_not_in_part(model_type: str) -> None:
    of = table(model_type)
    every = list(tensors(of, without=("stacked experts",)))
    without = [tensor for tensor in every if ".layers.2." not in tensor.name]
    assert len(without) < len(every)
    match(of, every)
    match(of, without)
    with pytest.raises(DamagedError):
        match(of, [tensor for tensor in every if tensor.name != "model.layers.2.self_attn.q_proj.weight"])


@cache
def true_files(model_type: str) -> tuple[tuple[Logical, ...], Matched]:
    """A family's tensors with experts apart where there is a choice, and how they are cut under their own name."""
    of = table(model_type)
    held = tuple(tensors(of, without=others(of, "experts")))
    return held, match(of, held)


@pytest.mark.parametrize("model_type, module", [
    ("exaone_moe", "mtp.layers.0.self_attn.q_proj"), ("mellum", "mtp.fc"),
    ("mimo_v2_flash", "model.mtp.layers.2.eh_proj"),
    ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj"), ("ernie4_5_moe", "model.mtp_linear_proj.0"),
])  # fmt: skip
def test_what_drafts_tokens_is_whole(model_type: str, module: str) -> None:
    held, _ = true_files(model_type)
    found = match(table(model_type), [*held, Logical(f"{module}.weight", "F32", (3, 5))])
    assert not any(dim.axes for dim in found.dims_of(f"{module}.weight"))
    assert found.rule_of(f"{module}.weight").note.startswith("whole: predicts further tokens")


@pytest.mark.parametrize("told", CONFIGS)
def test_a_name_that_lies_is_refused_or_makes_no_difference(told: str) -> None:
    """The tensors of every other family under the name of this one, with the numbers of both in the config."""
    refused = 0
    for given in CONFIGS:
        held, truth = true_files(given)
        try:
            found = match(table_for({**CONFIGS[told], **config(given), "model_type": told}), held)
        except TpshardError as error:
            assert isinstance(error, DamagedError | UnsupportedError)
            refused += 1
            continue
        for tensor in held:
            assert found.dims_of(tensor.name) == truth.dims_of(tensor.name), (given, tensor.name)
    assert len(CONFIGS) - 6 <= refused < len(CONFIGS)  # its own tensors at least are taken


NO_SHAPE = {"moe_layer_end_index", "num_nextn_predict_layers"}  # say which layers, or which may be there
TOLD_BY_OTHERS = {("jetmoe", "num_attention_heads"), ("laguna", "num_attention_heads")}  # as many as other keys say


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_count_that_the_files_contradict_is_refused_with_both_numbers(model_type: str) -> None:
    held, _ = true_files(model_type)
    for key, value in CONFIGS[model_type].items():
        if not isinstance(value, int) or key in NO_SHAPE or (model_type, key) in TOLD_BY_OTHERS:
            continue
        with pytest.raises(TpshardError) as told:
            match(table(model_type, **{key: value * 3}), held)
        assert len(re.findall(r"\d+", str(told.value))) >= 2, key
