"""Tables of dense language models, of vision towers and of what puts the two together, by names and shapes alone."""

from __future__ import annotations

from typing import Any

import pytest

from tpshard.axes import Dim
from tpshard.errors import DamagedError, UnsupportedError
from tpshard.matching import Logical, Matched, match
from tpshard.partition import partition
from tpshard.registry import families, part_of, table_for, table_of
from tpshard.table import ADDED_ONCE, NEEDS_GATHER, NEEDS_SUM, Table

Shapes = dict[str, tuple[int, ...]]
HIDDEN, FFN, VOCAB, HEADS, KV, SIZE = 24, 20, 33, 6, 3, 4
TEXT = {
    "hidden_size": HIDDEN, "intermediate_size": FFN, "vocab_size": VOCAB, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV,
}  # fmt: skip
WIDTH, WIDE, PATCH = 16, 28, 2
VIT = {
    "hidden_size": WIDTH, "intermediate_size": WIDE, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 4, "patch_size": PATCH,
}  # fmt: skip


def logicals(shapes: Shapes) -> list[Logical]:
    return [Logical(name, "BF16", shape) for name, shape in shapes.items()]


def matched(config: dict[str, Any], shapes: Shapes) -> Matched:
    return match(table_for(config), logicals(shapes))


def rows(dim: Dim, tp_size: int) -> list[list[int]]:
    """The indices that every rank holds of a dimension, in the order in which it holds them."""
    return [[at for run in runs for at in range(run.start, run.start + run.length)] for runs in
            partition(dim, tp_size).ranks]  # fmt: skip


def rule(table: Table, name: str) -> Any:
    (found,) = [rule for rule in table.rules if rule.name == name]
    return found


def blocks(*spans: tuple[int, int]) -> list[int]:
    return [at for start, stop in spans for at in range(start, stop)]


# -- what is stored in what order -----------------------------------------------------------------------------------

ORDERS: list[tuple[dict[str, Any], str, int, list[list[int]]]] = [
    # Persimmon, two heads of three: q, k, v of one head together.
    ({"model_type": "persimmon", "hidden_size": 6, "intermediate_size": 8, "vocab_size": 5, "num_hidden_layers": 1,
      "num_attention_heads": 2}, "@layers.{layer}.self_attn.query_key_value.weight", 0,
     [blocks((0, 9)), blocks((9, 18))]),
    # GLM: [gate; up] of four channels.
    ({"model_type": "glm4", **TEXT, "intermediate_size": 4}, "@layers.{layer}.mlp.gate_up_proj.weight", 0,
     [[0, 1, 4, 5], [2, 3, 6, 7]]),
    # Command R+: norms with a row a head; 6 query heads over 3 KV heads go 4 and 2, 2 and 1.
    ({"model_type": "cohere", **TEXT, "use_qk_norm": True}, "@layers.{layer}.self_attn.q_norm.weight", 0,
     [[0, 1, 2, 3], [4, 5]]),
    ({"model_type": "cohere", **TEXT, "use_qk_norm": True}, "@layers.{layer}.self_attn.k_norm.weight", 0,
     [[0, 1], [2]]),
    # Granite with sinks: one value a query head.
    ({"model_type": "granite_swa", **TEXT}, "@layers.{layer}.self_attn.sinks", 0, [[0, 1, 2, 3], [4, 5]]),
    # BitNet: the norms inside are cut as what they span is.
    ({"model_type": "bitnet", **TEXT}, "@layers.{layer}.self_attn.attn_sub_norm.weight", 0,
     [blocks((0, 16)), blocks((16, 24))]),
    ({"model_type": "bitnet", **TEXT}, "@layers.{layer}.mlp.ffn_sub_norm.weight", 0,
     [blocks((0, 10)), blocks((10, 20))]),
    # Qwen's towers: three blocks of all heads, two heads of two.
    ({"model_type": "qwen2_vl_vision", "embed_dim": 4, "hidden_size": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 2,
      "patch_size": 2, "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2},
     "@blocks.{layer}.attn.qkv.weight", 0, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
    # EXAONE 4.5's: four query heads of one index, then two keys, then two values.
    ({"model_type": "exaone4_5_vision", "hidden_size": 4, "out_hidden_size": 8, "depth": 1, "num_heads": 4,
      "num_key_value_heads": 2, "intermediate_size": 6, "patch_size": 2, "in_channels": 3, "temporal_patch_size": 2,
      "spatial_merge_size": 2}, "@blocks.{layer}.attn.qkv.weight", 0, [[0, 1, 4, 6], [2, 3, 5, 7]]),
    # SigLIP's pooling head: torch's MultiheadAttention stores [q; k; v].
    ({"model_type": "siglip_vision_model", **VIT, "hidden_size": 4, "num_attention_heads": 2},
     "@head.attention.in_proj_weight", 0, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
    # The Perception Encoder's: three blocks, and by its name three heads of two.
    ({"model_type": "perception_lm", "text_config": TEXT, "vision_config": {
        "architecture": "vit_pe_core_tiny_patch16_384", "model_args": {"embed_dim": 6, "depth": 1}}},
     "@blocks.{layer}.attn.qkv.weight", 0, [blocks((0, 4), (6, 10), (12, 16)), blocks((4, 6), (10, 12), (16, 18))]),
    # Aya's projector: [x; gate] of 12 channels.
    ({"model_type": "aya_vision", "text_config": {"model_type": "cohere2", **TEXT}, "vision_config": VIT},
     "@multi_modal_projector.linear_1.weight", 0, [blocks((0, 6), (12, 18)), blocks((6, 12), (18, 24))]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "name", "dim", "expected"), ORDERS, ids=lambda v: v if isinstance(v, str) else None)
def test_a_fused_tensor_is_cut_in_the_order_in_which_it_is_stored(
    config: dict[str, Any], name: str, dim: int, expected: list[list[int]]
) -> None:
    held = rule(table_for(config), name).dims[dim]
    assert isinstance(held, Dim)
    assert rows(held, 2) == expected


# -- what the cut demands of a runtime ------------------------------------------------------------------------------

INTERNVL = {"model_type": "internvl_vision", **VIT, "use_qk_norm": True}
JANUS = {"model_type": "janus_vision_model", **VIT, "use_qk_norm": True}
OVIS = {"model_type": "ovis2_vision", **VIT, "vocab_size": 20, "num_channels": 3, "num_visual_indicator_tokens": 5,
        "hidden_stride": 1}  # fmt: skip
NOTES = [
    ({"model_type": "bitnet", **TEXT}, "@layers.{layer}.self_attn.attn_sub_norm.weight", NEEDS_SUM),
    ({"model_type": "bitnet", **TEXT}, "@layers.{layer}.mlp.ffn_sub_norm.weight", NEEDS_SUM),
    (INTERNVL, "@encoder.layer.{layer}.attention.k_norm.weight", NEEDS_SUM),
    (JANUS, "@encoder.layers.{layer}.self_attn.q_norm.weight", NEEDS_SUM),
    (OVIS, "@head_linear.weight", NEEDS_GATHER),
    ({"model_type": "phi", **TEXT}, "@layers.{layer}.self_attn.dense.bias", ADDED_ONCE),
    ({"model_type": "phi", **TEXT}, "@layers.{layer}.mlp.fc2.bias", ADDED_ONCE),
    ({"model_type": "jais2", **TEXT}, "@layers.{layer}.self_attn.o_proj.bias", ADDED_ONCE),
    ({"model_type": "persimmon", **TEXT}, "@layers.{layer}.mlp.dense_4h_to_h.bias", ADDED_ONCE),
]  # fmt: skip


@pytest.mark.parametrize(("config", "name", "note"), NOTES, ids=lambda v: v if isinstance(v, str) else None)
def test_what_a_cut_demands_is_said(config: dict[str, Any], name: str, note: str) -> None:
    assert rule(table_for(config), name).note == note


@pytest.mark.parametrize("number", ["alpha_p", "alpha_n"])
def test_the_numbers_of_an_activation_are_whole_inside_what_is_cut(number: str) -> None:
    held = rule(table_for({"model_type": "apertus", **TEXT}), f"@layers.{{layer}}.mlp.act_fn.{number}")
    assert (held.role, held.dims) == ("inside", (1,))


# -- names that releases have used ----------------------------------------------------------------------------------


def llama(at: str = "model.", head: str = "lm_head.weight", *, size: int = SIZE, norms: bool = False) -> Shapes:
    """One layer under the prefix ``at``; no head where ``head`` is empty."""
    layer = f"{at}layers.0."
    shapes: Shapes = {f"{at}embed_tokens.weight": (VOCAB, HIDDEN), f"{at}norm.weight": (HIDDEN,)}
    for name, shape in {
        "self_attn.q_proj": (HEADS * size, HIDDEN), "self_attn.k_proj": (KV * size, HIDDEN),
        "self_attn.v_proj": (KV * size, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * size),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }.items():  # fmt: skip
        shapes[f"{layer}{name}.weight"] = shape
    if norms:
        shapes |= {f"{layer}self_attn.{x}_norm.weight": (size,) for x in "qk"}
    return shapes | ({head: (VOCAB, HIDDEN)} if head else {})


def vit(at: str, *, clip: bool = False) -> Shapes:
    """A tower of one layer: CLIP's, or SigLIP's without a head."""
    layer, positions = f"{at}encoder.layers.0.", 4 + clip
    shapes: Shapes = {
        f"{at}embeddings.patch_embedding.weight": (WIDTH, 3, PATCH, PATCH),
        f"{at}embeddings.position_embedding.weight": (positions, WIDTH),
    }
    norms = [f"{layer}layer_norm1", f"{layer}layer_norm2", f"{at}post_layernorm"]
    if clip:
        shapes[f"{at}embeddings.class_embedding"] = (WIDTH,)
        norms.append(f"{at}pre_layrnorm")
    else:
        shapes[f"{at}embeddings.patch_embedding.bias"] = (WIDTH,)
    for norm in norms:
        shapes |= {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,)}
    for name, out, into in (*((f"self_attn.{x}_proj", WIDTH, WIDTH) for x in ("q", "k", "v", "out")),
                            ("mlp.fc1", WIDE, WIDTH), ("mlp.fc2", WIDTH, WIDE)):  # fmt: skip
        shapes |= {f"{layer}{name}.weight": (out, into), f"{layer}{name}.bias": (out,)}
    return shapes


def two(at: str, into: int, out: int, names: tuple[str, str] = ("linear_1", "linear_2")) -> Shapes:
    """A projector of two matrices with biases."""
    return {
        f"{at}.{names[0]}.weight": (out, into), f"{at}.{names[0]}.bias": (out,),
        f"{at}.{names[1]}.weight": (out, out), f"{at}.{names[1]}.bias": (out,),
    }  # fmt: skip


LLAVA = {"model_type": "llava", "text_config": {"model_type": "llama", **TEXT}, "vision_config": VIT}
ONEVISION = {"model_type": "llava_onevision", "text_config": {"model_type": "qwen3", **TEXT, "head_dim": SIZE},
             "vision_config": VIT}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek_vl", "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **VIT}}  # fmt: skip
SMOLVLM = {"model_type": "smolvlm", "scale_factor": 2, "text_config": {"model_type": "llama", **TEXT},
           "vision_config": {"model_type": "smolvlm", **VIT}}  # fmt: skip
EXAONE = {"model_type": "exaone", **{k: v for k, v in TEXT.items() if k != "num_hidden_layers"}, "num_layers": 1}
EXAONE_NAMES = {
    "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
    "self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
}  # fmt: skip


def renamed(shapes: Shapes, names: dict[str, str]) -> Shapes:
    def of(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return {of(name): shape for name, shape in shapes.items()}


GEMMA3 = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **TEXT, "head_dim": SIZE},
          "vision_config": {"model_type": "siglip_vision_model", **VIT}}  # fmt: skip


def gemma3(text: str, outer: str, tower: str) -> Shapes:
    """Gemma 3 with images, its head tied."""
    shapes = llama(text, "", norms=True) | vit(tower)
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        shapes[f"{text}layers.0.{name}.weight"] = (HIDDEN,)
    at = f"{outer}multi_modal_projector"
    return shapes | {f"{at}.mm_input_projection_weight": (WIDTH, HIDDEN), f"{at}.mm_soft_emb_norm.weight": (WIDTH,)}


NEWLINE: Shapes = {"image_newline": (HIDDEN,)}
JOINED: Shapes = {"model.connector.modality_projection.proj.weight": (HIDDEN, 4 * WIDTH)}
SPELLINGS: list[tuple[str, dict[str, Any], Shapes]] = [
    ("llama", {"model_type": "llama", **TEXT}, llama()),
    ("llama without its head", {"model_type": "llama", **TEXT, "tie_word_embeddings": True}, llama("", "")),
    ("emu3 text", {"model_type": "emu3_text_model", **TEXT}, llama()),
    ("ernie 4.5", {"model_type": "ernie4_5", **TEXT, "head_dim": SIZE}, llama(head="")),
    ("exaone", EXAONE, renamed(llama(), EXAONE_NAMES)),
    ("llava before 4.52", LLAVA, llama("language_model.model.", "language_model.lm_head.weight")
     | vit("vision_tower.vision_model.", clip=True) | two("multi_modal_projector", WIDTH, HIDDEN)),
    ("llava since", LLAVA, llama("model.language_model.") | vit("model.vision_tower.vision_model.", clip=True)
     | two("model.multi_modal_projector", WIDTH, HIDDEN)),
    ("llava of transformers 5", LLAVA, llama("model.language_model.") | vit("model.vision_tower.", clip=True)
     | two("model.multi_modal_projector", WIDTH, HIDDEN)),
    ("onevision", ONEVISION, llama("language_model.model.", "language_model.lm_head.weight", norms=True)
     | vit("vision_tower.vision_model.") | two("multi_modal_projector", WIDTH, HIDDEN) | NEWLINE),
    ("deepseek vl, tied", DEEPSEEK, llama("model.language_model.", "") | vit("model.vision_model.")
     | two("model.aligner", WIDTH, HIDDEN, ("linear1", "linear2"))),
    ("gemma 3, published", GEMMA3, gemma3("language_model.model.", "", "vision_tower.vision_model.")),
    ("gemma 3 since", GEMMA3, gemma3("model.language_model.", "model.", "model.vision_tower.")),
    ("shieldgemma 2", {**GEMMA3, "model_type": "shieldgemma2"},
     gemma3("model.language_model.model.", "model.", "model.vision_tower.vision_model.")),
    ("smolvlm", SMOLVLM, llama("model.text_model.") | vit("model.vision_model.") | JOINED),
    ("clip's tower alone, before", {"model_type": "clip_vision_model", **VIT}, vit("vision_model.", clip=True)),
    ("clip's tower alone, since", {"model_type": "clip_vision_model", **VIT}, vit("", clip=True)),
    ("clip's tower with positions", {"model_type": "clip_vision_model", **VIT},
     vit("vision_model.", clip=True) | {"vision_model.embeddings.position_ids": (1, 5)}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "shapes"), [s[1:] for s in SPELLINGS], ids=[s[0] for s in SPELLINGS])
def test_every_spelling_that_releases_have_used_is_known(config: dict[str, Any], shapes: Shapes) -> None:
    found = matched(config, shapes)
    assert set(found.rules) == set(shapes)
    cut = [name for name in shapes if any(dim.axes for dim in found.dims_of(name))]
    assert all(name in cut for name in shapes if ".q_proj.weight" in name or ".fc1." in name or "gate_proj" in name)


@pytest.mark.parametrize(("whole", "part", "is_tied"), [(None, None, False), (True, False, True), (False, True, True),
                                                        (False, False, False), (None, True, True)])  # fmt: skip
def test_a_head_is_tied_where_the_whole_or_the_part_says_so(whole: Any, part: Any, is_tied: bool) -> None:
    config = {**LLAVA, "tie_word_embeddings": whole, "text_config": {**TEXT, "tie_word_embeddings": part}}
    shapes = (llama("model.language_model.", "") | vit("model.vision_tower.", clip=True)
              | two("model.multi_modal_projector", WIDTH, HIDDEN))  # fmt: skip
    if is_tied:
        assert matched(config, shapes).aliases == {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    else:
        with pytest.raises(DamagedError, match=r"lm_head\.weight is missing"):
            matched(config, shapes)


def test_a_flat_config_of_a_released_vision_language_model_is_read() -> None:
    vision = {"depth": 1, "embed_dim": 8, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2,
              "in_chans": 3, "temporal_patch_size": 2, "spatial_merge_size": 2, "model_type": "qwen2_vl"}  # fmt: skip
    table = table_for({"model_type": "qwen2_vl", **TEXT, "vision_config": vision})
    assert rule(table, "@layers.{layer}.self_attn.q_proj.weight").dims[0].extent == HEADS * SIZE
    assert rule(table, "@blocks.{layer}.attn.qkv.weight").dims[0].extent == 24


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "idefics3", "qwen3_vl", "mllama"])
def test_a_composite_without_its_language_model_is_refused(model_type: str) -> None:
    with pytest.raises(DamagedError, match="text_config"):
        table_for({"model_type": model_type, "vision_config": VIT})


@pytest.mark.parametrize("architecture", ["vit_pe_core_huge_patch14_448", "fastvit_mci3", None])
def test_a_tower_of_timm_that_is_not_known_is_whole(architecture: str | None) -> None:
    vision = {"architecture": architecture, "model_args": {"embed_dim": WIDTH, "depth": 1}}
    table = table_for({"model_type": "perception_lm", "text_config": TEXT, "vision_config": vision})
    assert {axis.name for axis in table.axes} == {"vocab", "ffn", "heads", "projector"}
    assert [module.name for module in table.modules] == ["@vision_tower.timm_model"]


def test_a_nested_config_is_completed_by_the_defaults_of_its_class() -> None:
    """LLaVA 1.5 as released: the language model's config says little but its type and its vocabulary."""
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05}
    vision = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 336,
              "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "vocab_size": 32000}  # fmt: skip
    table = table_for({"model_type": "llava", "text_config": text, "vision_config": vision})
    assert rule(table, "@layers.{layer}.mlp.down_proj.weight").dims[1].extent == 11008
    assert rule(table, "@embeddings.position_embedding.weight").dims == (577, 1024)
    assert table.stacks[1].layers == 32


def test_a_count_that_is_missing_at_the_top_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="num_hidden_layers"):
        table_for({"model_type": "llama", **{k: v for k, v in TEXT.items() if k != "num_hidden_layers"}})


def test_defaults_for_nested_configs_are_those_of_the_config_classes() -> None:
    transformers = pytest.importorskip("transformers")
    wrong = []
    for module in families().values():
        for model_type, usual in getattr(module, "USUAL", {}).items():
            if model_type not in module.MODEL_TYPES:
                continue
            known = transformers.CONFIG_MAPPING[model_type]
            values = known().to_dict()
            for key, value in usual.items():
                found = values.get(known.attribute_map.get(key, key), values.get(key, value))
                if found != value and not (isinstance(found, list) and set(found) == {value}):
                    wrong.append(f"{model_type}.{key}: {value} here, {found} there")
    assert not wrong


# -- towers beside a model ------------------------------------------------------------------------------------------


def test_a_tower_limits_no_degree_and_is_cut_where_it_can_be() -> None:
    config = {**LLAVA, "text_config": {**TEXT, "num_attention_heads": 8, "num_key_value_heads": 8}}
    table = table_for(config)
    assert {axis.name for axis in table.axes} == {"vocab", "ffn", "heads", "projector", "vision_ffn", "vision_heads"}
    q = rule(table, "@encoder.layers.{layer}.self_attn.q_proj.weight").dims[0]
    assert rows(q, 4) == [blocks((at, at + 4)) for at in (0, 4, 8, 12)]
    assert rows(q, 8) == [blocks((0, WIDTH))] * 8
    text = [r for r in table.rules if r.name == "@layers.{layer}.self_attn.q_proj.weight"]
    assert [len(held) for held in rows(text[0].dims[0], 8)] == [3] * 8


def test_two_towers_of_one_kind_are_two_parts() -> None:
    table = table_for({**LLAVA, "model_type": "video_llava"})
    assert {"image_heads", "video_heads", "heads"} <= {axis.name for axis in table.axes}


def test_only_the_layers_that_the_config_names_look_at_the_image() -> None:
    config = {"model_type": "mllama_text_model", **TEXT, "num_hidden_layers": 2, "cross_attention_layers": [1]}
    one = llama()
    two_layers = one | {n.replace("layers.0", "layers.1"): s for n, s in one.items() if "layers.0" in n}
    shapes = {n.replace("1.self_attn", "1.cross_attn"): s for n, s in two_layers.items()}
    shapes["model.embed_tokens.weight"] = (VOCAB + 8, HIDDEN)
    crossing: Shapes = {"cross_attn.q_norm.weight": (SIZE,), "cross_attn.k_norm.weight": (SIZE,),
                        "cross_attn_attn_gate": (1,), "cross_attn_mlp_gate": (1,)}  # fmt: skip
    shapes |= {f"model.layers.1.{name}": shape for name, shape in crossing.items()}
    assert set(matched(config, shapes).rules) == set(shapes)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.cross_attn"):
        matched({**config, "cross_attention_layers": [0]}, shapes)
    del shapes["model.layers.1.cross_attn_mlp_gate"]
    with pytest.raises(DamagedError, match=r"layers\.1\.cross_attn_mlp_gate is missing"):
        matched(config, shapes)


# -- modules that are whole as they stand ---------------------------------------------------------------------------

CHAMELEON_NORMS: Shapes = {
    f"model.layers.0.self_attn.{x}_norm.{part}": (heads, SIZE)
    for x, heads in (("q", HEADS), ("k", KV)) for part in ("weight", "bias")
}  # fmt: skip
CHAMELEON = {"model_type": "chameleon", **TEXT}
CONVOLUTIONS: Shapes = {"model.vqmodel.encoder.conv_in.weight": (8, 3, 3, 3), "model.vqmodel.quantize.beta": ()}


def test_a_module_that_is_whole_is_so_whatever_it_holds() -> None:
    shapes = llama() | CHAMELEON_NORMS | CONVOLUTIONS
    found = matched(CHAMELEON, shapes)
    for name in CONVOLUTIONS:
        assert found.rule_of(name).role == "whole"
        assert not any(dim.axes for dim in found.dims_of(name))


def test_a_module_that_is_whole_may_not_lack_everything() -> None:
    with pytest.raises(DamagedError, match=r"nothing of the module model\.vqmodel"):
        matched(CHAMELEON, llama() | CHAMELEON_NORMS)


@pytest.mark.parametrize("name", ["model.vqmodels.conv_in.weight", "vqmodel.conv_in.weight", "model.other.weight"])
def test_beside_a_module_that_is_whole_nothing_else_is_known(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")):
        matched(CHAMELEON, llama() | CHAMELEON_NORMS | CONVOLUTIONS | {name: (2, 2)})


def test_a_module_that_is_whole_is_taken_over_with_its_part() -> None:
    part = Table(0)
    part.whole_module("@codec", why="a codec")
    table = Table(0)
    table.include(part, "audio.", "model.audio.")
    found = match(table, logicals({"model.audio.codec.0.weight": (2,)}))
    assert set(found.rules) == {"model.audio.codec.0.weight"}


# -- lies -----------------------------------------------------------------------------------------------------------

LIES: list[tuple[str, dict[str, Any], Shapes, str]] = [
    ("arcee's config over llama's tensors", {"model_type": "arcee", **TEXT}, llama(), r"gate_proj"),
    ("glm's over llama's", {"model_type": "glm", **TEXT, "head_dim": SIZE}, llama(), r"gate_proj.*no rule"),
    ("persimmon's over llama's", {"model_type": "persimmon", **TEXT}, llama(), r"no rule"),
    ("qwen3's over llama's", {"model_type": "qwen3", **TEXT, "head_dim": SIZE}, llama(), r"q_norm\.weight is missing"),
    ("exaone4's over llama's", {"model_type": "exaone4", **TEXT}, llama(), r"input_layernorm.*no rule"),
    ("one KV head too few", {"model_type": "llama", **TEXT, "num_key_value_heads": 2}, llama(), r"12 rows.*implies 8"),
    ("another head size", {"model_type": "ministral3", **TEXT}, llama(), r"24 rows.*implies 768"),
    ("a wider MLP", {"model_type": "bitnet", **TEXT, "intermediate_size": 21}, llama(), r"20 rows.*implies 21"),
    ("another tower", {**LLAVA, "vision_config": {**VIT, "hidden_size": 32}}, llama("model.language_model.")
     | vit("model.vision_tower.", clip=True) | two("model.multi_modal_projector", WIDTH, HIDDEN), r"16.*implies 32"),
    ("a layer less in the tower", {**LLAVA, "vision_config": {**VIT, "num_hidden_layers": 2}},
     llama("model.language_model.") | vit("model.vision_tower.", clip=True)
     | two("model.multi_modal_projector", WIDTH, HIDDEN), r"encoder\.layers\.1\..* is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "shapes", "message"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_config_of_another_model_is_refused_with_what_contradicts_it(
    config: dict[str, Any], shapes: Shapes, message: str
) -> None:
    with pytest.raises((DamagedError, UnsupportedError), match=message):
        matched(config, shapes)


@pytest.mark.parametrize(
    ("key", "value"),
    [("deepstack_visual_indexes", 3), ("patch_size", "14"), ("spatial_merge_size", None), ("num_heads", 0)],
)
def test_a_tower_with_a_number_that_makes_no_sense_is_refused(key: str, value: Any) -> None:
    usual = families()["qwen3_vision"].USUAL["qwen3_vl_vision"]
    with pytest.raises((DamagedError, UnsupportedError), match=key):
        table_for({"model_type": "qwen3_vl_vision", **usual, key: value})


def test_a_part_of_a_type_that_no_table_serves_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no table serves model_type 'nonesuch'"):
        table_for({**LLAVA, "vision_config": {**VIT, "model_type": "nonesuch"}})


def test_the_type_of_a_part_that_does_not_say_is_the_usual_one() -> None:
    from tpshard.config import Config

    part = part_of(Config({"vision_config": {"hidden_size": 64}}), "vision_config", model_type="pixtral")
    assert (part.model_type, part.count("hidden_size"), part.count("num_hidden_layers")) == ("pixtral", 64, 24)
    assert table_of(part).layers == 24
