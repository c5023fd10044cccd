"""Exact rules of latent attention, Gemma 3n and 4, Inkling, BLT and their like: ranges, spellings, marks, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from tpshard.axes import Dim
from tpshard.errors import DamagedError, TpshardError, UnsupportedError
from tpshard.matching import Logical, Matched, match
from tpshard.partition import partition
from tpshard.registry import table_for
from tpshard.table import ADDED_ONCE, NEEDS_GATHER, NEEDS_SUM, NORMED_BY, PASSES_ON, UNUSED, Rule, Table, placed

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

LATENT: Config = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 8,
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "n_routed_experts": 4, "moe_intermediate_size": 12, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "index_n_heads": 2, "index_head_dim": 7,
}  # fmt: skip
GEMMA: Config = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size_per_layer_input": 70, "hidden_size_per_layer_input": 6,
    "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
INKLING: Config = {
    "vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 10, "d_rel": 3,
    "sliding_window_size": 8, "rel_extent": 16, "conv_kernel_size": 4, "moe_intermediate_size": 12,
    "n_routed_experts": 4, "intermediate_size": 80, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
}  # fmt: skip
BLT: Config = {
    "encoder_config": {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 30},
    "decoder_config": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 40},
    "global_config": {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2,
                      "intermediate_size": 40},
    "patcher_config": {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 20,
                       "vocab_size": 30},
    "encoder_hash_byte_group_vocab": 11,
}  # fmt: skip
TINY: dict[str, Config] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "blt": BLT,
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": {**LATENT, "head_dim": 16, "o_groups": 4, "o_lora_rank": 9, "num_hash_layers": 1,
                    "num_experts_per_tok": 2, "compress_ratios": [0, 4, 128]},
    "dory": {**GEMMA, "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"]},
    "dots3_note_text": {**LATENT, "shared_experts_intermediate_size": 14,
                        "layer_types": ["indexed_attention", "full_attention", "sliding_attention"],
                        "per_layer_config": {"2": {"num_attention_heads": 4, "v_head_dim": 9}}},
    "gemma3n_text": {**GEMMA, "altup_num_inputs": 3, "laurel_rank": 5, "activation_sparsity_pattern": [0.9, 0, 0, 0]},
    "gemma4_text": {**GEMMA, "per_layer_config": {"1": {"head_dim": 24}, "3": {"head_dim": 24}}},
    "gemma4_unified_text": {**GEMMA, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": True},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": {**LATENT, "indexer_types": ["full", "shared", "full"]},
    "hrm_text": {**GEMMA, "num_layers_per_stack": 2},
    "hy_v4": LATENT,
    "inkling_text": {**INKLING, "mlp_layer_types": ["dense", "sparse", "sparse"], "n_shared_experts": 2},
    "inkling2_text": INKLING,
    "inkling2_loop_text": {**INKLING, "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_gate_rank": 5},
    "longcat_flash": {**LATENT, "num_layers": 2, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 12,
                      "zero_expert_num": 2},
    "minicpm3": LATENT,
    "mistral4": LATENT,
    "sarvam_mla": LATENT,
    "youtu": LATENT,
}  # fmt: skip


def table_of(model_type: str, **changed: Any) -> Table:
    return table_for({"model_type": model_type, **TINY[model_type], **changed})


def stored(table: Table, *, without: Iterable[str] = (), prefix: int = 0, optional: bool = False) -> Shapes:
    """A checkpoint that the table takes, by names and shapes; ``without`` are blocks that it lacks."""
    shapes: Shapes = {}
    for rule in table.rules:
        stack = table.stacks[rule.stack]
        if rule.block in without or (rule.optional and not optional):
            continue
        pairs = stack.pairs
        name = placed(rule.name, pairs[min(prefix, len(pairs) - 1)])
        of = rule.layers if rule.layers is not None else range(stack.layers)
        for layer in sorted(of) if "{layer}" in name else [0]:
            for expert in range(stack.experts) if "{expert}" in name else [0]:
                filled = name.replace("{layer}", str(layer)).replace("{expert}", str(expert)).replace("{idle}", "4")
                shapes[filled] = shape_of(rule)
    return shapes


def shape_of(rule: Rule) -> tuple[int, ...]:
    return tuple(2 if d is None else d.extent if isinstance(d, Dim) else d for d in rule.dims)


LATER_FORMS = ("stacked experts", "prediction", "as published", "last, as HY-V4-VL has it")


def whole_model(model_type: str, **changed: Any) -> tuple[Table, Shapes]:
    """The table of a tiny model and its checkpoint in one form."""
    table = table_of(model_type, **changed)
    if table.spellings:  # the first of them
        dropped = {number for stacks in table.spellings for number in stacks[1:]}
        table.rules = [rule for rule in table.rules if rule.stack not in dropped]
    return table, stored(table, without=LATER_FORMS)


def matched(table: Table, shapes: Shapes) -> Matched:
    return match(table, [Logical(name, "F32", shape) for name, shape in shapes.items()])


def rows(rule: Matched, name: str, rank: int, tp_size: int, dim: int = 0) -> list[tuple[int, int]]:
    runs = partition(rule.dims[name][dim], tp_size).ranks[rank]
    return [(run.start, run.start + run.length) for run in runs]


@pytest.mark.parametrize("model_type", TINY)
def test_a_tiny_model_is_taken_whole_and_every_tensor_is_missed(model_type: str) -> None:
    table, shapes = whole_model(model_type)
    found = matched(table, shapes)
    assert set(found.rules) == set(shapes)
    for name in [*shapes][:: max(1, len(shapes) // 12)]:
        with pytest.raises(DamagedError, match=re.escape(name.rsplit(".", 1)[0].rsplit(".", 1)[-1])):
            matched(table, {other: shape for other, shape in shapes.items() if other != name})


@pytest.mark.parametrize("model_type", TINY)
def test_what_no_rank_can_do_without_is_whole_for_a_reason(model_type: str) -> None:
    for rule in table_of(model_type).rules:
        assert rule.role != "whole" or rule.note.startswith("whole: "), rule.name


@pytest.mark.parametrize(
    ("model_type", "name", "dim", "expected"),
    [
        ("deepseek_v3", "model.layers.0.self_attn.q_b_proj.weight", 0, [(40, 80)]),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", 0, [(44, 88)]),
        ("deepseek_v3", "model.layers.0.self_attn.o_proj.weight", 1, [(20, 40)]),
        ("axk2", "model.layers.0.self_attn.q_b_proj.weight", 0, [(60, 120)]),  # a gate beside the queries, head by head
        ("hy_v4", "model.layers.0.self_attn.linear_gate.weight", 0, [(20, 40)]),
        ("deepseek_v4", "model.layers.0.attn.wq_b.weight", 0, [(64, 128)]),  # two groups of two heads
        ("deepseek_v4", "model.layers.0.attn.wo_a.weight", 0, [(18, 36)]),
        ("deepseek_v4", "model.layers.0.attn.wo_b.weight", 1, [(18, 36)]),
        ("deepseek_v4", "model.layers.0.attn.attn_sink", 0, [(4, 8)]),
        ("dots3_note_text", "model.layers.2.self_attn.o_proj.weight", 1, [(18, 36)]),  # the sliding layers' own heads
        ("dots3_note_text", "model.layers.1.self_attn.g_proj.weight", 0, [(4, 8)]),
        ("longcat_flash", "model.layers.1.self_attn.1.q_b_proj.weight", 0, [(40, 80)]),
        ("hrm_text", "model.L_module.layers.1.attn.gqkv_proj.weight", 0,
         [(64, 128), (192, 256), (320, 384), (448, 512)]),
        ("inkling2_text", "model.llm.layers.1.mlp.experts.w13_weight", 1, [(12, 24)]),  # gate and up in turns
        ("inkling2_text", "model.llm.layers.1.attn.k_sconv.static_w", 1, [(16, 32)]),
        ("inkling2_text", "model.llm.layers.1.attn.k_sconv.weight_proj", 0, [(4, 8)]),
        ("inkling2_text", "model.llm.layers.0.attn.wr_du.weight", 0, [(6, 12)]),
        ("inkling_text", "model.layers.1.mlp.shared_experts.down_proj", 2, [(6, 12)]),
        ("gemma4_text", "model.layers.1.self_attn.k_proj.weight", 0, [(24, 48)]),
        ("gemma4_text", "model.layers.3.self_attn.o_proj.weight", 1, [(96, 192)]),
        ("gemma4_unified_text", "model.layers.3.mlp.gate_proj.weight", 0, [(80, 160)]),  # twice as wide
        ("blt", "model.encoder_hash_tok_embedding.weight", 0, [(33, 66)]),
        ("blt", "model.global_transformer.layers.1.self_attn.k_proj.weight", 0, [(24, 48)]),
    ],
)  # fmt: skip
def test_what_the_second_of_two_ranks_holds(
    model_type: str, name: str, dim: int, expected: list[tuple[int, int]]
) -> None:
    table, shapes = whole_model(model_type)
    assert rows(matched(table, shapes), name, 1, 2, dim) == expected


@pytest.mark.parametrize(
    ("model_type", "name", "note"),
    [
        ("gemma3n_text", "@layers.{layer}.mlp.gate_proj.weight", {NEEDS_GATHER: {0}, "": {1, 2, 3}}),
        ("gemma3n_text", "@layers.{layer}.self_attn.k_proj.weight", {"": {0, 1}, UNUSED: {2, 3}}),
        ("youtu", "@layers.{layer}.self_attn.q_a_proj.weight", {NEEDS_GATHER: None}),
        ("minicpm3", "@layers.{layer}.self_attn.q_a_proj.weight", {"": None}),
        ("longcat_flash", "@layers.{layer}.mlp.experts.{expert}.down_proj.weight", {PASSES_ON: None}),
        ("longcat_flash", "@layers.{layer}.mlp.experts.{idle}.up_proj.weight", {UNUSED: None}),
        ("dory", "@layers.{layer}.self_attn.o_proj.weight", {f"{NORMED_BY}attn_sub_norm": None}),
        ("dory", "@layers.{layer}.mlp.down_proj.weight", {f"{NORMED_BY}ffn_sub_norm": None}),
    ],
)
def test_what_a_runtime_must_do_is_marked(model_type: str, name: str, note: dict[str, set[int] | None]) -> None:
    found = [rule for rule in table_of(model_type).rules if rule.name == name]
    assert {rule.note: set(rule.layers) if rule.layers is not None else None for rule in found} == note


@pytest.mark.parametrize("model_type", TINY)
def test_no_norm_of_these_spans_what_is_cut_and_biases_are_added_once(model_type: str) -> None:
    for rule in table_of(model_type).rules:
        assert rule.note != NEEDS_SUM, rule.name  # Dory's have no weights, and are marked at what follows them
        if rule.note == ADDED_ONCE:
            assert rule.role.endswith("_bias") and not any(isinstance(dim, Dim) for dim in rule.dims)


@pytest.mark.parametrize(
    ("model_type", "prefix"), [("deepseek_v3", "layers."), ("gemma4_text", "model.language_model.layers."),
                               ("gemma3n_text", "layers."), ("dory", "model.layers."), ("blt", "local_encoder.")]
)  # fmt: skip
def test_other_prefixes(model_type: str, prefix: str) -> None:
    table, shapes = whole_model(model_type)
    own = next(name for name in shapes if re.search(r"layers\.0\.", name))
    old = {"blt": "model.local_encoder."}.get(model_type, own[: own.index("layers.0") + len("layers.")])
    start = "model." if model_type == "blt" else old.removesuffix("layers.")
    new = "" if model_type == "blt" else prefix.removesuffix("layers.")
    renamed = {new + name.removeprefix(start) if name.startswith(start) else name: s for name, s in shapes.items()}
    assert any(name.startswith(prefix) for name in renamed)
    assert set(matched(table, renamed).rules) == set(renamed)


@pytest.mark.parametrize(
    ("model_type", "also", "without"),
    [
        ("deepseek_v3", "stacked experts", ("experts", "prediction")),
        ("deepseek_v4", "as published", ("as saved", "stacked experts")),
        ("hy_v4", "last, as HY-V4-VL has it", ("last", "experts", "prediction")),
        ("hy_v4", "stacked experts", ("last, as HY-V4-VL has it", "experts")),
    ],
)
def test_other_forms_on_disk_and_two_at_once(model_type: str, also: str, without: tuple[str, ...]) -> None:
    table = table_of(model_type)
    other, first = stored(table, without=without), stored(table, without=LATER_FORMS)
    assert set(matched(table, other).rules) == set(other) != set(first)
    with pytest.raises(DamagedError, match="of which the model has only one"):
        matched(table, other | first)


def test_dory_counts_layers_in_two_ways() -> None:
    """Published files have attention and MLP as layers of their own; a file has one form, and all of it."""
    table = table_of("dory")
    saved, published = table.spellings[0]
    forms = []
    for kept in (saved, published):
        one = Table(0, rules=[r for r in table.rules if r.stack in (0, kept)], stacks=[])
        one.stacks = table.stacks
        forms.append(stored(one))
    assert "backbone.layers.3.mixer.down_proj.weight" in forms[1]
    assert "backbone.layers.1.mlp.down_proj.weight" in forms[0]
    for shapes in forms:
        assert set(matched(table, shapes).rules) == set(shapes)
        with pytest.raises(DamagedError, match="is missing"):
            matched(table, {name: s for name, s in shapes.items() if ".1." not in name})
    with pytest.raises(DamagedError, match="of which a model has one"):
        matched(table, forms[0] | forms[1])
    with pytest.raises(DamagedError, match="hold none of"):
        matched(table, {name: s for name, s in forms[0].items() if "layers" not in name})


def test_idle_experts_may_be_stored_or_not() -> None:
    table, shapes = whole_model("longcat_flash")
    assert matched(table, shapes)
    idle = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": (12, 64)
        for layer in (0, 1) for expert in (4, 5) for name in ("gate", "up")
    }  # fmt: skip
    found = matched(table, shapes | idle)
    assert {found.rules[name].note for name in idle} == {UNUSED}
    beyond = {"model.layers.0.mlp.experts.6.gate_proj.weight": (12, 64)}
    with pytest.raises(DamagedError, match=r"experts\.6\.gate_proj\.weight is one too many: .* promises 4 experts"):
        matched(table, shapes | beyond)


@pytest.mark.parametrize(
    ("model_type", "of", "words"),
    [
        ("deepseek_v3", "glm_moe_dsa", "indexer"),
        ("axk2", "deepseek_v32", r"q_b_proj\.weight has 80 rows .* implies 120"),
        ("deepseek_v3", "axk1", "post_mlp_layernorm"),
        ("mistral4", "deepseek_v3", "e_score_correction_bias"),
        ("gemma4_unified_text", "gemma4_text", r"q_proj\.weight has 192 rows .* implies 4,096"),
        ("gemma3n_text", "gemma4_text", r"q_proj\.weight has 192 rows .* implies 128"),
        ("inkling2_text", "inkling2_loop_text", "controllers"),
    ],
)
def test_a_config_over_another_familys_tensors_is_refused(model_type: str, of: str, words: str) -> None:
    _, shapes = whole_model(of)
    with pytest.raises(TpshardError, match=words):
        matched(table_of(model_type), shapes)


@pytest.mark.parametrize(
    ("model_type", "changed", "numbers"),
    [
        ("deepseek_v3", {"kv_lora_rank": 25}, ("28", "29")),
        ("axk2", {"q_lora_rank": 21}, ("20", "21")),
        ("deepseek_v4", {"o_lora_rank": 10}, ("36", "40")),
        ("dots3_note_text", {"per_layer_config": {"2": {"num_attention_heads": 2, "v_head_dim": 9}}}, ("40", "20")),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 20}, "3": {"head_dim": 24}}}, ("192", "160")),
        ("gemma3n_text", {"laurel_rank": 6}, ("5", "6")),
        ("inkling2_text", {"d_rel": 4}, ("24", "32")),
        ("blt", {"encoder_hash_byte_group_vocab": 12}, ("66", "72")),
        ("hrm_text", {"head_dim": 8}, ("512", "256")),
        ("longcat_flash", {"zero_expert_num": 3}, ("6", "7")),
    ],
)
def test_a_lie_is_refused_with_both_numbers(model_type: str, changed: Config, numbers: tuple[str, str]) -> None:
    _, shapes = whole_model(model_type)
    with pytest.raises(DamagedError) as refused:
        matched(table_of(model_type, **changed), shapes)
    assert all(re.search(rf"\b{number}\b", str(refused.value)) for number in numbers)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("deepseek_v3", "kv_lora_rank"), ("deepseek_v4", "q_lora_rank"), ("hy_v4", "v_head_dim"), ("dory", "hidden_size"),
     ("longcat_flash", "num_layers"), ("youtu", "qk_rope_head_dim"), ("hrm_text", "vocab_size")],
)  # fmt: skip
def test_a_count_that_is_missing_is_not_guessed(model_type: str, key: str) -> None:
    with pytest.raises(UnsupportedError, match=key):
        table_for({"model_type": model_type, **{k: v for k, v in TINY[model_type].items() if k != key}})


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_keys_that_a_model_stores_and_does_not_use(model_type: str) -> None:
    table, shapes = whole_model(model_type)
    unused: list[Rule] = [rule for rule in table.rules if rule.note == UNUSED]
    extra = {
        placed(rule.name, table.stacks[0].pairs[0]).replace("{layer}", str(layer)): shape_of(rule)
        for rule in unused
        for layer in rule.layers or ()
    }
    assert extra and not extra.keys() & shapes.keys()
    assert len(matched(table, shapes | extra).rules) == len(shapes) + len(extra)
