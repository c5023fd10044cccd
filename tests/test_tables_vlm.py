"""Exact rules of models that read images: names on disk, towers cut or whole, fused rows, marks, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tables import Config, Shapes, rows, rule_of, tensors

from tpshard.axes import Dim
from tpshard.errors import TpshardError
from tpshard.matching import match
from tpshard.registry import table_for
from tpshard.table import ADDED_ONCE, NEEDS_SUM, placed

TEXT: Config = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
}  # fmt: skip
BERT: Config = {**TEXT, "num_key_value_heads": None, "head_dim": None}
TOWER: Config = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "num_channels": 3, "num_patches": 16,
}  # fmt: skip
SAM: Config = {**TOWER, "mlp_dim": 40, "output_channels": 8, "global_attn_indexes": [1], "window_size": 2}
OPT: Config = {**BERT, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}
T5: Config = {"model_type": "t5", "vocab_size": 90, "d_model": 32, "d_kv": 4, "d_ff": 48, "num_layers": 2,
              "num_heads": 8}  # fmt: skip
BART: Config = {"vocab_size": 90, "d_model": 32, "max_position_embeddings": 16} | {
    f"{side}_{key}": n for side in ("encoder", "decoder")
    for key, n in (("layers", 2), ("attention_heads", 8), ("ffn_dim", 48))
}  # fmt: skip
DELTA: Config = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
                 "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
KOSMOS: Config = {"vocab_size": 90, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 8}
DAVIT: Config = {"depths": [1, 2], "embed_dim": [8, 16], "num_heads": [2, 4], "num_groups": [2, 4],
                 "patch_size": [7, 3], "patch_prenorm": [False, True], "projection_dim": 32}  # fmt: skip
QWEN_TOWER: Config = {"depth": 2, "hidden_size": 24, "intermediate_size": 40, "num_heads": 4, "in_channels": 3,
                      "patch_size": 4, "temporal_patch_size": 2, "num_position_embeddings": 16, "out_hidden_size": 32,
                      "deepstack_visual_indexes": [0, 1]}  # fmt: skip
LFM: Config = {**TEXT, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}


def both(model_type: str, text: Config, tower: Config, **more: Any) -> Config:
    return {"model_type": model_type, "text_config": text, "vision_config": tower, **more}


TINY: dict[str, Config] = {
    "altclip": both("altclip", BERT, TOWER),
    "blip": both("blip", BERT, TOWER),
    "blip, both": both("blip", BERT, TOWER, architectures=["BlipForQuestionAnswering"]),
    "blip, compared": both("blip", BERT, TOWER, architectures=["BlipModel"]),
    "blip-2": both("blip-2", OPT, TOWER, qformer_config=BERT),
    "blip-2, t5": both("blip-2", T5, TOWER, qformer_config=BERT),
    "cosmos3_edge": both("cosmos3_edge", TEXT, TOWER),
    "cosmos3_omni": both("cosmos3_omni", TEXT, QWEN_TOWER),
    "deepseek_vl_hybrid": both("deepseek_vl_hybrid", TEXT, TOWER, high_res_vision_config=SAM),
    "florence2": both("florence2", BART, DAVIT),
    "granite_docling": both("granite_docling", TEXT, {**TOWER, "out_hidden_size": 32}),
    "idefics": {**BERT, "model_type": "idefics", "vision_config": {**TOWER, "embed_dim": 24}, "use_resampler": True,
                "additional_vocab_size": 2, "cross_layer_interval": 2},
    "instructblip": both("instructblip", {**TEXT, "model_type": "llama"}, TOWER, qformer_config=BERT),
    "kosmos-2": both("kosmos-2", KOSMOS, TOWER),
    "kosmos-2.5": both("kosmos-2.5", KOSMOS, {**TOWER, "head_dim": 6}),
    "lfm2_vl": both("lfm2_vl", LFM, TOWER),
    "lfm3_vl": both("lfm3_vl", LFM, {**TOWER, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}),
    "minicpmv4_6": both("minicpmv4_6", {**TEXT, **DELTA}, {**TOWER, "window_kernel_size": [2, 2]}),
    "molmo2": both("molmo2", TEXT, {**TOWER, "num_key_value_heads": 4, "head_dim": 6, "image_size": [16, 16]},
                   adapter_config={"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4,
                                   "head_dim": 6, "intermediate_size": 40}),
    "pi0": {"model_type": "pi0", "dit_config": {**TEXT, "hidden_size": 16},
            "vlm_config": both("paligemma", TEXT, TOWER)},
    "qianfan_ocr": both("qianfan_ocr", TEXT, {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]}),
}  # fmt: skip


def checkpoint(config: Config, prefix: int = 0, *, spelling: int = 0) -> Shapes:
    """Names and shapes of a checkpoint that has all that must be there, under one of the prefixes and spellings."""
    table = table_for(config)
    chosen = {stacks[spelling] for stacks in table.spellings}
    refused = {block for choice in table.choices for block in choice.blocks[1:]}
    shapes: Shapes = {}
    shared = {(names[0], stack) for names, stack in table.shares}
    for rule in table.rules:
        stack = table.stacks[rule.stack]
        needed = not rule.optional or (rule.name, rule.stack) in shared
        if not needed or rule.block in refused or (stack.optional and rule.stack not in chosen):
            continue
        name = placed(rule.name, stack.pairs[min(prefix, len(stack.pairs) - 1)])
        shape = tuple(dim.extent if isinstance(dim, Dim) else dim if dim is not None else 3 for dim in rule.dims)
        layers = [n for n in range(stack.layers) if rule.layers is None or n in rule.layers]
        names = [name.replace("{layer}", str(n)) for n in layers] if "{layer}" in name else [name]
        shapes |= dict.fromkeys(names, shape)
    for module in table.modules:
        shapes[placed(module.name, table.stacks[module.stack].pairs[prefix]) + ".weight"] = (3, 5)
    return shapes


@pytest.mark.parametrize("case", TINY)
def test_every_tensor_of_a_whole_checkpoint_is_known(case: str) -> None:
    shapes = checkpoint(TINY[case])
    assert set(match(table_for(TINY[case]), tensors(shapes)).rules) == set(shapes)


@pytest.mark.parametrize("case", TINY)
def test_each_missing_tensor_is_named(case: str) -> None:
    table, shapes = table_for(TINY[case]), checkpoint(TINY[case])
    for name in [name for name in shapes if re.search(r"vision|visual|project|qformer|aligner|merger", name)][::9]:
        with pytest.raises(TpshardError, match=re.escape(name.rpartition(".")[2])):
            match(table, tensors({other: shape for other, shape in shapes.items() if other != name}))


@pytest.mark.parametrize("case", ["altclip", "cosmos3_omni", "qianfan_ocr"])
def test_both_spellings_are_known_and_a_mixture_is_refused(case: str) -> None:
    table = table_for(TINY[case])
    first, second = (checkpoint(TINY[case], spelling=n) for n in (0, 1))
    assert first.keys() != second.keys()
    for shapes in (first, second):
        assert set(match(table, tensors(shapes)).rules) == set(shapes)
    odd = next(name for name in second if name not in first)
    with pytest.raises(TpshardError):
        match(table, tensors({**first, odd: second[odd]}))


# fmt: off
ROWS = {
    # q, k, v of four heads with six rows each: two heads a rank
    "blip, tower": ("blip", "vision_model.encoder.layers.0.self_attn.qkv.weight", 0, 2, 1,
                    [(12, 24), (36, 48), (60, 72)]),
    "florence, windows": ("florence2", "model.vision_tower.blocks.1.0.spatial_block.window_attn.qkv.bias", 0, 4, 3,
                          [(12, 16), (28, 32), (44, 48)]),
    "florence, groups": ("florence2", "model.vision_tower.blocks.0.0.channel_block.channel_attn.proj.weight", 1, 2, 1,
                         [(4, 8)]),
    # eight query heads of 8 rows over two kv heads
    "molmo, q k v": ("molmo2", "model.transformer.blocks.0.self_attn.att_proj.weight", 0, 2, 1,
                     [(32, 64), (72, 80), (88, 96)]),
    "molmo, up and gate": ("molmo2", "model.transformer.blocks.0.mlp.ff_proj.weight", 0, 2, 1, [(24, 48), (72, 96)]),
    "pi0, expert beside": ("pi0", "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.weight", 0, 4, 1,
                           [(16, 32)]),
    "lfm3, convolutions": ("lfm3_vl", "model.vision_tower.layers.0.conv.in_proj.weight", 0, 2, 1,
                           [(12, 24), (36, 48), (60, 72)]),
}
# fmt: on


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_a_rank(case: str) -> None:
    config, name, axis, tp_size, rank, expected = ROWS[case]
    assert rows(TINY[config], name, axis, tp_size, rank) == expected


@pytest.mark.parametrize("case", [case for case in TINY if case not in ("florence2", "pi0")])
def test_a_tower_with_few_heads_is_whole_where_the_language_model_is_cut_further(case: str) -> None:
    table = table_for(TINY[case])
    assert all(axis.serves(8) for axis in table.axes)
    few = [axis for axis in table.axes if axis.name.startswith(("vision_", "high_res_")) and axis.parts() == 4]
    assert few and all(axis.is_whole(8) and not axis.is_whole(4) for axis in few)


@pytest.mark.parametrize(
    ("case", "name", "note"),
    [
        ("kosmos-2", "text_model.model.layers.0.ffn.ffn_layernorm.weight", NEEDS_SUM),
        ("kosmos-2", "text_model.model.layers.1.self_attn.inner_attn_ln.bias", NEEDS_SUM),
        ("kosmos-2.5", "text_model.model.layers.0.ffn.ffn_layernorm.weight", NEEDS_SUM),
        ("blip-2", "qformer.encoder.layer.0.crossattention.output.dense.bias", ADDED_ONCE),
        ("lfm2_vl", "model.multi_modal_projector.linear_2.bias", ADDED_ONCE),
    ],
)
def test_marks(case: str, name: str, note: str) -> None:
    assert rule_of(table_for(TINY[case]), name).note == note


def test_pi0_with_its_embedding_under_the_name_of_the_head() -> None:
    shapes = checkpoint(TINY["pi0"])
    name = next(name for name in shapes if "embed_tokens" in name)
    shapes["paligemma_with_expert.paligemma.lm_head.weight"] = shapes.pop(name)
    shapes["paligemma_with_expert.gemma_expert.lm_head.weight"] = (90, 16)
    assert set(match(table_for(TINY["pi0"]), tensors(shapes)).rules) == set(shapes)


LIES = {
    "queries": ("blip-2", {"num_query_tokens": 5}, r"32.*5|5.*32"),
    "width of the tower": ("lfm2_vl", {"vision_config": {**TOWER, "hidden_size": 28}}, r"24.*28|28.*24"),
    "joined patches": ("lfm2_vl", {"downsample_factor": 3}, r"96.*216|216.*96"),
    "layers of the tower": ("kosmos-2", {"vision_config": {**TOWER, "num_hidden_layers": 3}}, r"missing"),
    "a decoder": ("blip", {"architectures": ["BlipModel"]}, r"text_decoder"),
    "interval": ("idefics", {"cross_layer_interval": 1}, r"gated_cross_attn_layers\.1"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_config_that_lies_is_refused(lie: str) -> None:
    case, more, says = LIES[lie]
    with pytest.raises(TpshardError) as refused:
        match(table_for({**TINY[case], **more}), tensors(checkpoint(TINY[case])))
    assert re.search(says, str(refused.value)), str(refused.value)
