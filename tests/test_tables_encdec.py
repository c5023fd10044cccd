"""Encoder-decoders: what their tables say of tied embeddings, optional stacks, position biases and codebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from tpshard.axes import Dim
from tpshard.errors import DamagedError, TpshardError, UnsupportedError
from tpshard.matching import Logical, Matched, match
from tpshard.partition import partition
from tpshard.registry import table_for
from tpshard.table import ADDED_ONCE, placed

BART = {
    "model_type": "bart", "d_model": 32, "vocab_size": 90, "max_position_embeddings": 20, "encoder_layers": 2,
    "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 8, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 32, "vocab_size": 90, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 32,
}  # fmt: skip
WHISPER = {**BART, "model_type": "whisper", "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12}
MUSICGEN = {
    "model_type": "musicgen_decoder", "hidden_size": 32, "num_codebooks": 3, "num_attention_heads": 4, "ffn_dim": 48,
    "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip


def tensors(config: Mapping[str, Any], *, prefix: int = 0, optional: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that the table demands, and with ``optional`` of the others of known shape."""
    table = table_for(config)
    out: dict[str, tuple[int, ...]] = {}
    for rule in table.rules:
        stack = table.stacks[rule.stack]
        shape = tuple(d.extent if isinstance(d, Dim) else d for d in rule.dims)
        if None in shape or (rule.optional and not optional):
            continue
        layers = rule.layers if rule.layers is not None else range(stack.layers)
        for layer in layers if "{layer}" in rule.name else (0,):
            out[placed(rule.name.replace("{layer}", str(layer)), stack.pairs[prefix])] = shape  # type: ignore[assignment]
    for share in table.shares:
        name = placed(share.names[0], table.stacks[share.stack].pairs[prefix])
        rule = next(rule for rule in table.rules if rule.name == share.names[0])
        out[name] = tuple(d.extent if isinstance(d, Dim) else d for d in rule.dims)  # type: ignore[misc]
    return out


def matched(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Matched:
    return match(table_for(config), [Logical(name, "F32", shape) for name, shape in shapes.items()])


def without(shapes: Mapping[str, tuple[int, ...]], parts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if not any(part in name for part in parts)}


def runs(found: Matched, name: str, dim: int, tp_size: int) -> list[list[tuple[int, int]]]:
    return [[tuple(run) for run in runs] for runs in partition(found.dims[name][dim], tp_size).ranks]  # type: ignore[misc]


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("config", [BART, {**BART, "model_type": "mbart"}, WHISPER], ids=lambda c: c["model_type"])
def test_with_and_without_the_prefix(config: dict[str, Any], prefix: int) -> None:
    shapes = tensors(config, prefix=prefix)
    assert set(matched(config, shapes).dims) == set(shapes)


EMBEDDINGS = [f"model.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]


@pytest.mark.parametrize("held", [*EMBEDDINGS, "lm_head.weight"])
def test_one_embedding_under_any_of_its_names(held: str) -> None:
    shapes = without(tensors(BART), ["shared"]) | {held: (90, 32)}
    found = matched(BART, shapes)
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        assert name == held or found.aliases[name] == held
    assert found.dims[held][0].axes[0].kind == "padded"


def test_the_embedding_must_be_there_under_one_of_them() -> None:
    with pytest.raises(DamagedError, match=r"model\.shared\.weight is missing.*lm_head\.weight"):
        matched(BART, without(tensors(BART), ["shared"]))


def test_what_a_file_holds_twice_is_kept_twice() -> None:
    twice = tensors(BART) | {"model.encoder.embed_tokens.weight": (90, 32), "lm_head.weight": (90, 32)}
    assert matched(BART, twice).aliases == {"model.decoder.embed_tokens.weight": "model.shared.weight"}


@pytest.mark.parametrize(
    ("config", "architecture", "side", "is_refused"),
    [
        (BART, "BartForCausalLM", "encoder.layers", False),
        (BART, "BartForConditionalGeneration", "encoder.layers", True),
        (BART, "BartForConditionalGeneration", "decoder.layers", True),
        (T5, "T5EncoderModel", "decoder.block", False),
        (T5, "T5ForConditionalGeneration", "decoder.block", True),
        (WHISPER, "WhisperForCausalLM", "encoder", False),
        (WHISPER, "WhisperModel", "encoder", True),
    ],
)
def test_the_class_says_which_side_may_be_missing(
    config: dict[str, Any], architecture: str, side: str, is_refused: bool
) -> None:
    named = {**config, "architectures": [architecture]}
    half = side.split(".")[0]
    whole = tensors(named)
    shapes = without(whole, [f"{half}."]) | {k: v for k, v in whole.items() if "embed_tokens" in k}
    if is_refused:
        with pytest.raises(DamagedError, match=f"{half}.*missing"):
            matched(named, shapes)
    else:
        assert set(matched(named, shapes).dims) == set(shapes)


def test_half_a_side_is_damage_whatever_the_class() -> None:
    shapes = tensors({**BART, "architectures": ["BartForCausalLM"]})
    with pytest.raises(DamagedError, match=r"encoder\.layers\.1\.fc1\.weight is missing"):
        matched({**BART, "architectures": ["BartForCausalLM"]}, without(shapes, ["encoder.layers.1.fc1.weight"]))


def test_sides_are_cut_apart_and_cross_attention_with_the_decoder() -> None:
    found = matched(BART, tensors(BART))
    axes = {name: axis.name for name, dims in found.dims.items() for dim in dims for axis in dim.axes}
    assert axes["model.encoder.layers.0.self_attn.q_proj.weight"] == "encoder_heads"
    assert axes["model.decoder.layers.2.encoder_attn.k_proj.weight"] == "decoder_heads"
    assert runs(found, "model.decoder.layers.0.encoder_attn.v_proj.weight", 0, 4)[3] == [(24, 8)]
    assert runs(found, "model.decoder.layers.0.encoder_attn.out_proj.weight", 1, 4)[3] == [(24, 8)]
    once = {name for name, rule in found.rules.items() if rule.note == ADDED_ONCE}
    assert "model.decoder.layers.0.encoder_attn.out_proj.bias" in once
    assert "model.encoder.layers.1.fc2.bias" in once


def test_whisper_has_no_bias_on_keys() -> None:
    shapes = tensors(WHISPER)
    assert "model.decoder.layers.0.encoder_attn.k_proj.bias" not in shapes
    assert "model.decoder.layers.0.encoder_attn.v_proj.bias" in shapes
    with pytest.raises(UnsupportedError, match=r"k_proj\.bias"):
        matched(WHISPER, shapes | {"model.encoder.layers.0.self_attn.k_proj.bias": (32,)})


def test_the_bias_of_the_logits_stays_whole() -> None:
    found = matched(BART, tensors(BART) | {"final_logits_bias": (1, 90)})
    assert not any(dim.axes for dim in found.dims["final_logits_bias"])
    assert "adds to the gathered logits" in found.rules["final_logits_bias"].note


def test_position_biases_have_a_column_a_head() -> None:
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    found = matched(T5, tensors(T5))
    assert runs(found, name, 1, 2) == [[(0, 2)], [(2, 2)]]
    assert runs(found, "encoder.block.1.layer.0.SelfAttention.q.weight", 0, 2) == [[(0, 32)], [(32, 32)]]
    assert "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight" not in found.dims


@pytest.mark.parametrize(
    ("kind", "more", "present", "absent"),
    [
        ("t5", {}, "DenseReluDense.wi.weight", "wi_0"),
        ("t5", {"feed_forward_proj": "gated-gelu"}, "DenseReluDense.wi_1.weight", "wi.weight"),
        ("mt5", {}, "DenseReluDense.wi_0.weight", "wi.weight"),
        ("umt5", {}, "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight", "wi.weight"),
        ("longt5", {}, "encoder.block.1.layer.0.LocalSelfAttention.q.weight", "encoder.block.0.layer.0.SelfAttention"),
        ("longt5", {"encoder_attention_type": "transient-global"}, "global_input_layer_norm.weight", "LocalSelf"),
    ],
)
def test_the_kinds_of_t5(kind: str, more: dict[str, Any], present: str, absent: str) -> None:
    names = tensors({**T5, "model_type": kind, **more})
    assert any(present in name for name in names)
    assert not any(absent in name for name in names)


def test_an_untied_head_is_demanded_of_what_has_one() -> None:
    untied = {**T5, "tie_word_embeddings": False, "architectures": ["T5ForConditionalGeneration"]}
    shapes = tensors(untied)
    assert shapes["lm_head.weight"] == (90, 32)
    with pytest.raises(DamagedError, match="lm_head"):
        matched(untied, without(shapes, ["lm_head"]))
    assert "lm_head.weight" not in tensors({**untied, "architectures": ["T5EncoderModel"]})


def test_every_codebook_has_an_embedding_and_a_head() -> None:
    found = matched(MUSICGEN, tensors(MUSICGEN))
    for book in range(3):
        assert runs(found, f"model.decoder.embed_tokens.{book}.weight", 0, 2)[1][0] == (33, 32)
        assert runs(found, f"lm_heads.{book}.weight", 0, 2)[1] == [(32, 32)]
    with pytest.raises(DamagedError, match=r"lm_heads\.2\.weight is missing"):
        matched(MUSICGEN, without(tensors(MUSICGEN), ["lm_heads.2"]))


@pytest.mark.parametrize(
    ("config", "others", "said"),
    [
        (BART, {**BART, "model_type": "pegasus"}, r"layer_norm\.weight"),
        (BART, {**BART, "d_model": 64}, "implies 64|32"),
        ({**BART, "decoder_layers": 4}, BART, r"decoder\.layers\.3"),
        ({**T5, "model_type": "mt5"}, T5, r"wi\.weight"),
        (T5, {**T5, "num_heads": 2}, "implies 32|64"),
    ],
)
def test_another_model_is_refused(config: dict[str, Any], others: dict[str, Any], said: str) -> None:
    with pytest.raises(TpshardError, match=said):
        matched(config, tensors(others))


@pytest.mark.parametrize(
    ("step", "sparse"), [(1, {0, 1, 2, 3}), (2, {1, 3}), (4, {1})]
)  # layers // sparse layers
def test_switch_counts_its_layers_with_experts(step: int, sparse: set[int]) -> None:
    config = {
        **T5, "model_type": "switch_transformers", "num_layers": 4, "num_decoder_layers": 4, "num_experts": 3,
        "num_sparse_encoder_layers": 4 // step, "num_sparse_decoder_layers": 0,
    }  # fmt: skip
    names = tensors(config)
    held = {int(name.split(".")[2]) for name in names if "encoder.block" in name and "expert_2.wo" in name}
    assert held == sparse
    assert runs(matched(config, names), "encoder.block.1.layer.1.mlp.experts.expert_2.wo.weight", 1, 2)[1] == [(24, 24)]


def test_two_models_put_together() -> None:
    bert = {
        "model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1,
        "intermediate_size": 48, "vocab_size": 90, "max_position_embeddings": 16,
    }  # fmt: skip
    config = {"model_type": "encoder-decoder", "encoder": bert, "decoder": {**bert, "add_cross_attention": True}}
    axes = {axis.name for axis in table_for(config).axes}
    assert {"encoder_heads", "decoder_heads", "encoder_vocab", "decoder_vocab"} <= axes
    names = tensors(config)
    assert any(name.endswith("embeddings.word_embeddings.weight") and name.startswith("encoder.") for name in names)
    assert any("crossattention" in name for name in names if name.startswith("decoder."))
    assert not any("crossattention" in name for name in names if name.startswith("encoder."))
