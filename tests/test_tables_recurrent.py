"""Exact rules of models with a state: rows of fused mixers, spellings on disk, marks, hybrid stacks, refusals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import tables
from tables import Config, Shapes, rows, rule_of, tensors

from tpshard.axes import Dim
from tpshard.degrees import largest_degree
from tpshard.errors import DamagedError, TpshardError, UnsupportedError
from tpshard.matching import match
from tpshard.registry import table_for
from tpshard.table import ADDED_ONCE, NEEDS_GATHER, NEEDS_SUM, placed

TEXT: Config = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MAMBA2: Config = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_expand": 2}
DELTA: Config = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
MOE: Config = {"num_experts": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10}
LATENT: Config = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
SPEECH: Config = {
    "vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TINY: dict[str, Config] = {
    "bailing_hybrid": {**TEXT, **MOE, **LATENT, "layer_types": KINDS, "first_k_dense_replace": 1},
    "bamba": {**TEXT, **MAMBA2, "attn_layer_indices": [2]},
    "falcon_h1": {**TEXT, **MAMBA2, "mamba_d_ssm": 64},
    "falcon_mamba": {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "granitemoehybrid": {**TEXT, **MAMBA2, "num_local_experts": 3, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {**TEXT, "num_experts": 3, "attn_layer_period": 4, "attn_layer_offset": 2},
    "kimi_linear": {**TEXT, **MOE, **LATENT, "linear_attn_config": {
        "num_heads": 4, "head_dim": 8, "kda_layers": [1, 3], "full_attn_layers": [2, 4]}},
    "lara_mini": {**TEXT, **MOE, **DELTA, "layer_types": KINDS},
    "lfm2": {**TEXT, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**TEXT, **MOE, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "lfm3": {**TEXT, "layer_types": ["conv", "full_attention"] * 2},
    "mamba": {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
               "n_groups": 2, "state_size": 5, "conv_kernel": 4},
    "minimax": {**TEXT, "num_local_experts": 3, "block_size": 4},
    "nemotron_h": {**TEXT, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 5,
                   "hybrid_override_pattern": "M*-E", "n_routed_experts": 3, "moe_intermediate_size": 12,
                   "moe_shared_expert_intermediate_size": 10},
    "olmo_hybrid": {**TEXT, **DELTA},
    "qwen3_5_moe_text": {**TEXT, **DELTA, **MOE},
    "qwen3_5_text": {**TEXT, **DELTA},
    "qwen3_next": {**TEXT, **DELTA, **MOE, "mlp_only_layers": [1]},
    "qwen4_exp_text": {**TEXT, **DELTA, **MOE, "hc_count": 2, "hc_lowrank": 6, "ple_layer_ids": [2],
                       "ple_embed_dim": 16, "ngram_vocab_size_base": 10, "heads_per_ngram": 2, "split_ngram_parts": 4,
                       "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                       "indexer_head_dim": 8},
    "recurrent_gemma": {**TEXT, "lru_width": 48},
    "rwkv": {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2},
    "xlstm": {"vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4},
    "zamba": {**TEXT, "num_key_value_heads": 8, "n_mamba_heads": 2, "mamba_d_state": 4,
              "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {**TEXT, "num_key_value_heads": 8, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 5,
               "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"], "num_mem_blocks": 2, "adapter_rank": 3,
               "use_shared_attention_adapter": True},
}  # fmt: skip
FAMILIES = list(TINY)


def config_of(model_type: str, **more: Any) -> Config:
    return {**TINY[model_type], "model_type": model_type, **more}


def checkpoint(config: Config, prefix: int = 0, *, blocks: Sequence[str] = ()) -> Shapes:
    """A checkpoint without prediction layers and repeated blocks, unless they are among the ``blocks``."""
    refused = ("repeated", "prediction")
    return tables.checkpoint(config, prefix, blocks=blocks, refused=refused, optional_stacks=False)


# fmt: off
ROWS = {
    # [x; z], 64 channels each
    "mamba, x and z": ("mamba", "backbone.layers.0.mixer.in_proj.weight", 0, 4, 1, [(16, 32), (80, 96)]),
    "mamba, inside": ("falcon_mamba", "backbone.layers.0.mixer.x_proj.weight", 1, 4, 1, [(16, 32)]),
    # z 64, x 64, B 2*5, C 2*5, dt 8
    "mamba-2, whole groups": ("bamba", "model.layers.0.mamba.in_proj.weight", 0, 2, 1,
                              [(32, 64), (96, 128), (133, 138), (143, 148), (152, 156)]),
    "mamba-2, half a group": ("bamba", "model.layers.0.mamba.in_proj.weight", 0, 4, 1,
                              [(16, 32), (80, 96), (128, 133), (138, 143), (150, 152)]),
    "mamba-2, convolution": ("nemotron_h", "backbone.layers.0.mixer.conv1d.bias", 0, 4, 3,
                             [(48, 64), (69, 74), (79, 84)]),
    "mamba-2, out": ("zamba2", "model.layers.1.mamba.out_proj.weight", 1, 4, 3, [(48, 64)]),
    # x and z alternate, and two heads of 32 channels follow each other
    "zamba, x and z": ("zamba", "model.layers.0.mamba.in_proj.weight", 0, 4, 1, [(16, 32), (80, 96)]),
    "zamba, inside a head": ("zamba", "model.layers.0.mamba.x_proj_weight", 2, 4, 1, [(8, 16)]),
    "zamba, out": ("zamba", "model.layers.1.mamba_decoder.mamba.out_proj.weight", 1, 4, 1, [(8, 16), (40, 48)]),
    # [key head][q 8, k 8, v 2*6, z 2*6]
    "qwen3-next, a key head": ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight", 0, 2, 1, [(40, 80)]),
    "qwen3-next, a value head": ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight", 0, 4, 3,
                                 [(40, 56), (62, 68), (74, 80)]),
    "qwen3-next, b and a": ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight", 0, 4, 2, [(4, 5), (6, 7)]),
    "qwen3.5, three blocks": ("qwen3_5_text", "model.layers.0.linear_attn.in_proj_qkv.weight", 0, 4, 3,
                              [(8, 16), (24, 32), (50, 56)]),
    "lara, all in one": ("lara_mini", "model.layers.0.linear_attn.in_proj.weight", 0, 2, 1,
                         [(8, 16), (24, 32), (44, 56), (68, 80), (82, 84), (86, 88)]),
    "qwen, query and gate": ("qwen3_next", "model.layers.3.self_attn.q_proj.weight", 0, 8, 1, [(16, 32)]),
    "kimi, a log": ("kimi_linear", "model.layers.0.self_attn.A_log", 2, 4, 3, [(3, 4)]),
    "kimi, from a latent": ("kimi_linear", "model.layers.2.self_attn.f_b_proj.weight", 0, 4, 3, [(24, 32)]),
    "bailing, a gate a head": ("bailing_hybrid", "model.layers.1.attention.g_proj.weight", 0, 4, 1, [(2, 4)]),
    "minimax, head by head": ("minimax", "model.layers.1.self_attn.qkv_proj.weight", 0, 8, 1, [(24, 48)]),
    "minimax, a buffer": ("minimax", "model.layers.1.self_attn.diagonal_decay", 1, 8, 1, [(1, 2)]),
    "griffin, gates": ("recurrent_gemma", "model.layers.0.temporal_block.rg_lru.input_gate_weight", 0, 8, 7, [(7, 8)]),
    "griffin, channels": ("recurrent_gemma", "model.layers.0.temporal_block.linear_out.weight", 1, 8, 7, [(42, 48)]),
    "short convolution": ("lfm2", "model.layers.0.conv.in_proj.weight", 0, 4, 1, [(8, 16), (40, 48), (72, 80)]),
    "xlstm, keys": ("xlstm", "backbone.blocks.0.mlstm_layer.k.weight", 0, 4, 1, [(8, 16)]),
    "rwkv, the gate of the sum": ("rwkv", "rwkv.blocks.0.feed_forward.receptance.weight", 0, 4, 1, [(8, 16)]),
    "n-grams, of every part": ("qwen4_exp_text", "model.layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight", 0,
                               2, 1, [(8, 16)]),
    "an adapter's way up": (
        "zamba2", "model.layers.2.shared_transformer.feed_forward.gate_up_proj_adapter_list.1.1.weight", 0, 2, 1,
        [(24, 48), (72, 96)]),
}
# fmt: on


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_a_rank(case: str) -> None:
    model_type, name, axis, tp_size, rank, expected = ROWS[case]
    assert rows(config_of(model_type), name, axis, tp_size, rank) == expected


MARKS = {
    "gated norm of a group": ("bamba", "model.layers.0.mamba.norm.weight", "norm", NEEDS_SUM),
    "lightning's norm": ("minimax", "model.layers.1.self_attn.norm.weight", "norm", NEEDS_SUM),
    "olmo's q norm": ("olmo_hybrid", "model.layers.3.self_attn.q_norm.weight", "norm", NEEDS_SUM),
    "a delta net's norm is a head's": ("qwen3_5_text", "model.layers.0.linear_attn.norm.weight", "norm", ""),
    "xlstm's norm is a head's": ("xlstm", "backbone.blocks.0.mlstm_layer.multihead_norm.weight", "linear_head", ""),
    "rwkv's gate": ("rwkv", "rwkv.blocks.0.feed_forward.receptance.weight", "gathered", NEEDS_GATHER),
    "zamba's joint": ("zamba", "model.layers.1.linear.weight", "gathered", NEEDS_GATHER),
    "griffin's output": ("recurrent_gemma", "model.layers.0.temporal_block.linear_out.bias", "linear_out_bias",
                         ADDED_ONCE),
    "from channels to dt, B, C": ("jamba", "model.layers.0.mamba.x_proj.weight", "ssm_x", ""),
    "queries and gates": ("qwen3_next", "model.layers.3.self_attn.q_proj.weight", "q_gate", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", MARKS)
def test_what_a_tensor_is_marked_with(case: str) -> None:
    model_type, name, role, note = MARKS[case]
    rule = rule_of(table_for(config_of(model_type)), name)
    assert (rule.role, rule.note) == (role, note)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_prefix_of_a_whole_checkpoint_is_known(model_type: str) -> None:
    config = config_of(model_type)
    table = table_for(config)
    for prefix in range(len(table.stacks[0].pairs)):
        shapes = checkpoint(config, prefix)
        assert set(match(table, tensors(shapes)).rules) == set(shapes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_missing_tensor_is_named(model_type: str) -> None:
    config = config_of(model_type)
    table, shapes = table_for(config), checkpoint(config)
    for name in list(shapes)[:: max(len(shapes) // 12, 1)]:
        with pytest.raises(DamagedError, match=r"missing from the weights|holds none of"):
            match(table, tensors({n: s for n, s in shapes.items() if n != name}))


DEGREES = {  # what limits the degree: heads or channels, never the groups that share B and C, keys, or a small matrix
    "bamba": 8, "mamba": 64, "zamba": 8, "zamba2": 8, "rwkv": 32, "qwen3_next": 4, "kimi_linear": 4, "xlstm": 4,
}  # fmt: skip


@pytest.mark.parametrize("model_type", DEGREES)
def test_the_largest_degree(model_type: str) -> None:
    assert largest_degree(table_for(config_of(model_type)).axes) == DEGREES[model_type]


FORMS: dict[str, tuple[Config, Sequence[str], str]] = {  # other spellings and forms, a name that shows them
    "stacked experts": (config_of("qwen3_next"), ["stacked experts"], "model.layers.0.mlp.experts.gate_up_proj"),
    "mixtral's, stacked": (config_of("minimax"), ["stacked experts"], "model.layers.0.mlp.gate.weight"),
    "nemotron's, stacked": (config_of("nemotron_h"), ["stacked experts"], "backbone.layers.3.mixer.experts.up_proj"),
    "granite's, in memory": (config_of("granitemoehybrid"), ["stacked experts"],
                             "model.layers.0.block_sparse_moe.experts.gate_up_proj"),
    "kimi's dense layer": (config_of("kimi_linear"), ["dense, saved by transformers"],
                           "model.layers.0.block_sparse_moe.up_proj.weight"),
    "olmo's norms": (config_of("olmo_hybrid"), ["norms in memory"], "model.layers.0.input_layernorm.weight"),
    "a shared block that every user stores": (config_of("zamba"), ["repeated"],
                                              "model.layers.3.shared_transf.self_attn.o_proj.weight"),
    "layer types, old": (config_of("granitemoehybrid", layer_types=["linear_attention", "full_attention"] * 2), [],
                         "model.layers.1.self_attn.q_proj.weight"),
    "layers by letters": (config_of("nemotron_h"), [], "backbone.layers.1.mixer.q_proj.weight"),
    "layers by words": (config_of("nemotron_h", layers_block_type=["moe", "mlp"]), [],
                        "backbone.layers.1.mixer.up_proj.weight"),
    "experts in a latent": (config_of("nemotron_h", moe_latent_size=7), [],
                            "backbone.layers.3.mixer.fc1_latent_proj.weight"),
    "no experts": (config_of("granitemoehybrid", num_local_experts=0), [],
                   "model.layers.0.shared_mlp.input_linear.weight"),
    "both kinds in a layer": (config_of("falcon_h1", mamba_rms_norm=True), [], "model.layers.3.mamba.norm.weight"),
    "xlstm, fused": (config_of("xlstm", weight_mode="fused"), [], "backbone.blocks.0.mlstm_layer.qkv_opreact.weight"),
    "a prediction layer": (config_of("bailing_hybrid"), [], "model.layers.3.attention.kv_b_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_released_forms(form: str) -> None:
    config, blocks, shown = FORMS[form]
    shapes = checkpoint(config, blocks=blocks)
    assert shown in shapes
    assert set(match(table_for(config), tensors(shapes)).rules) == set(shapes)


@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h"])
def test_prediction_layers_are_there_whole_or_not_at_all(model_type: str) -> None:
    config = config_of(model_type, num_nextn_predict_layers=1)
    table, shapes = table_for(config), checkpoint(config)
    extra: Shapes = {}
    for rule in table.rules:
        stack = table.stacks[rule.stack]
        if not stack.optional or rule.optional or rule.block == "stacked experts":
            continue
        shape = tuple(dim.extent if isinstance(dim, Dim) else dim or 1 for dim in rule.dims)
        name = placed(rule.name, stack.pairs[0])
        layers = range(stack.layers) if rule.layers is None else rule.layers
        for layer in layers if "{layer}" in name else [0]:
            for expert in range(stack.experts) if "{expert}" in name else [0]:
                extra[name.replace("{layer}", str(layer)).replace("{expert}", str(expert))] = shape
    assert any(name.startswith("mtp.") for name in extra)
    match(table, tensors(shapes | extra))
    missing = next(name for name in extra if "norm" in name)
    with pytest.raises(DamagedError, match="missing"):
        match(table, tensors({n: s for n, s in (shapes | extra).items() if n != missing}))


LIES: dict[str, tuple[Config, Shapes, str]] = {
    "more groups": (config_of("bamba", mamba_n_groups=4), checkpoint(config_of("bamba")), r"156.*176"),
    "more state": (config_of("mamba", state_size=5), checkpoint(config_of("mamba")), r"10.*12|4.*5"),
    "value heads of another size": (config_of("qwen3_next", linear_value_head_dim=7),
                                    checkpoint(config_of("qwen3_next")), r"80.*88|6.*7"),
    "qwen3.5 called qwen3-next": ({**config_of("qwen3_5_moe_text"), "model_type": "qwen3_next"},
                                  checkpoint(config_of("qwen3_5_moe_text")), r"in_proj_qkv.*no rule"),
    "attention where the config has a state": (config_of("bamba", attn_layer_indices=[1]),
                                               checkpoint(config_of("bamba")), r"no rule|missing"),
    "a layer fewer": (config_of("lfm2", num_hidden_layers=3), checkpoint(config_of("lfm2")),
                      r"layers\.3.*no rule|3 layers"),
    "a wider width": (config_of("rwkv", hidden_size=64), checkpoint(config_of("rwkv")), r"32.*64"),
    "n-gram tables of other primes": (config_of("qwen4_exp_text", ngram_vocab_size_base=100),
                                      checkpoint(config_of("qwen4_exp_text")), r"16.*106"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_config_that_lies_is_refused(lie: str) -> None:
    config, shapes, says = LIES[lie]
    with pytest.raises(TpshardError) as refused:
        match(table_for(config), tensors(shapes))
    assert re.search(says, str(refused.value)), str(refused.value)


def test_tables_of_ngrams_too_large_to_work_out_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="n-gram"):
        table_for(config_of("qwen4_exp_text", ngram_vocab_size_base=2**40))
