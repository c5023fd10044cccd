"""Exact rules of models that hear or speak: names on disk, what is cut and what stays whole, marks, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tables import Config, Shapes, checkpoint, rows, rule_of, tensors

from tpshard.axes import Dim
from tpshard.errors import TpshardError
from tpshard.matching import match
from tpshard.registry import table_for
from tpshard.table import ADDED_ONCE, NEEDS_SUM, placed

TEXT: Config = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": False,
}  # fmt: skip
WHISPER: Config = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "num_mel_bins": 10, "max_source_positions": 12}  # fmt: skip
THIRD: Config = {"d_model": 24, "encoder_ffn_dim": 40, "encoder_layers": 2, "encoder_attention_heads": 4,
                 "num_mel_bins": 16, "downsample_hidden_size": 6, "output_dim": 32}  # fmt: skip
SENSE: Config = {"num_mel_bins": 5, "num_stacked_frames": 7, "hidden_size": 24, "num_attention_heads": 4,
                 "intermediate_size": 40, "num_hidden_layers": 4, "num_timestamp_prediction_layers": 2,
                 "fsmn_kernel_size": 3}  # fmt: skip
ADAPTOR: Config = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 2,
                   "projector_hidden_size": 20}  # fmt: skip
TOKENIZER: Config = {"num_filters": 2, "downsampling_ratios": [2, 4], "depths": [1, 1, 2], "hidden_size": 6}
SEAMLESS: Config = {
    "hidden_size": 32, "vocab_size": 90, "t2u_vocab_size": 40, "char_vocab_size": 11, "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 8, "speech_encoder_intermediate_size": 48,
} | {f"{part}{side}_{what}": n for part in ("", "t2u_") for side in ("encoder", "decoder")
     for what, n in (("layers", 2), ("ffn_dim", 48), ("attention_heads", 8))}  # fmt: skip
MOSHI: Config = {
    "model_type": "moshi", "vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
    "ffn_dim": 96, "num_codebooks": 2, "audio_vocab_size": 20, "architectures": ["MoshiForConditionalGeneration"],
    "audio_encoder_config": {"model_type": "mimi", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    "depth_decoder_config": {"hidden_size": 24, "input_size": 32, "num_hidden_layers": 2, "ffn_dim": 40,
                             "num_attention_heads": 4, "vocab_size": 90, "audio_vocab_size": 20, "num_codebooks": 2},
}  # fmt: skip


def hears(model_type: str, tower: Config, **more: object) -> Config:
    return {"model_type": model_type, "text_config": TEXT, "audio_config": tower, **more}


TINY: dict[str, Config] = {
    "audioflamingo3": hears("audioflamingo3", WHISPER),
    "cohere_asr": {**TEXT, "model_type": "cohere_asr", "encoder_config": {**WHISPER, "hidden_size": 24}},
    "fun_asr_nano": hears("fun_asr_nano", SENSE, adaptor_config=ADAPTOR),
    "glmasr": hears("glmasr", WHISPER),
    "moshi": MOSHI,
    "musicflamingo": hears("musicflamingo", WHISPER),
    "omniasr": hears("omniasr", WHISPER),
    "qwen3_asr": hears("qwen3_asr", THIRD),
    "seamless_m4t": {**SEAMLESS, "model_type": "seamless_m4t", "architectures": ["SeamlessM4TModel"]},
    "seamless_m4t_v2": {**SEAMLESS, "model_type": "seamless_m4t_v2", "architectures": ["SeamlessM4Tv2Model"]},
    "vibevoice": hears("vibevoice", TOKENIZER, semantic_model_config=TOKENIZER,
                       diffusion_head_config={"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40}),
    "vibevoice_asr": {"model_type": "vibevoice_asr", "text_config": TEXT,
                      "acoustic_tokenizer_encoder_config": TOKENIZER, "semantic_tokenizer_encoder_config": TOKENIZER},
}  # fmt: skip


def files(config: Config) -> Shapes:
    """A checkpoint with all that must be there: of two spellings the first, of what is shared one, whole modules."""
    table = table_for(config)
    second = {number for stacks in table.spellings for number in stacks[1:]}
    shapes = {name: shape for name, shape in checkpoint(config).items() if rule_of(table, name).stack not in second}
    for rule in table.modules:
        if not rule.optional:
            shapes[placed(rule.name, table.stacks[rule.stack].pairs[0]) + ".weight"] = (3, 3)
    for share in table.shares:
        name = placed(share.names[0], table.stacks[share.stack].pairs[0])
        dims = rule_of(table, name).dims
        shapes[name] = tuple(dim.extent if isinstance(dim, Dim) else dim or 3 for dim in dims)
    return shapes


@pytest.mark.parametrize("name", TINY)
def test_a_checkpoint_matches_whole_and_no_tensor_may_be_missing_or_longer(name: str) -> None:
    table, shapes = table_for(TINY[name]), files(TINY[name])
    matched = match(table, tensors(shapes))
    assert len(matched.dims) == len(shapes)
    cut = [one for one, dims in matched.dims.items() if any(dim.axes for dim in dims)]
    for one in (cut[0], cut[len(cut) // 2], cut[-1]):
        longer = (*shapes[one][:-1], shapes[one][-1] + 1)
        with pytest.raises(TpshardError, match=str(longer[-1])):
            match(table, tensors({**shapes, one: longer}))
        with pytest.raises(TpshardError):
            match(table, tensors({other: shape for other, shape in shapes.items() if other != one}))


@pytest.mark.parametrize(
    ("name", "tensor", "axis", "expected"),
    [
        # the values of SenseVoice's layers are whole, queries and outputs cut by head
        ("fun_asr_nano", "model.audio_tower.layers.1.self_attn.q_proj.weight", 0, [(12, 24)]),
        ("fun_asr_nano", "model.audio_tower.layers.1.self_attn.o_proj.weight", 1, [(12, 24)]),
        ("cohere_asr", "model.transf_decoder._decoder.layers.0.first_sub_layer.key_net.weight", 0, [(4, 8)]),
        # the second convolution of a pair by what it takes
        ("seamless_m4t_v2", "t2u_model.model.decoder.layers.0.conv1.weight", 0, [(16, 32)]),
        ("seamless_m4t_v2", "t2u_model.model.decoder.layers.0.conv2.weight", 1, [(16, 32)]),
        # a tokenizer's feed-forwards, each stage along its own width
        ("vibevoice", "model.audio_tower.encoder.conv_layers.1.stage.0.ffn.linear1.weight", 0, [(16, 32)]),
        ("vibevoice", "model.audio_tower.encoder.stem.stage.0.ffn.linear1.weight", 0, [(4, 8)]),
        # a matrix for every codebook in one tensor: the codebooks whole, its rows cut
        ("moshi", "depth_decoder.layers.0.self_attn.q_proj.linear.weight", 1, [(12, 24)]),
    ],
)
def test_rows_of_the_second_of_two_ranks(name: str, tensor: str, axis: int, expected: list[tuple[int, int]]) -> None:
    assert rows(TINY[name], tensor, axis, 2, 1) == expected


@pytest.mark.parametrize("tensor", ["v_proj.weight", "fsmn.conv.weight"])
def test_a_memory_over_all_heads_keeps_the_values_whole(tensor: str) -> None:
    rule = rule_of(table_for(TINY["fun_asr_nano"]), f"model.audio_tower.layers.1.self_attn.{tensor}")
    assert rule.note.startswith("whole: ") and not any(isinstance(dim, Dim) for dim in rule.dims)


@pytest.mark.parametrize(
    ("name", "tensor", "note"),
    [
        ("seamless_m4t_v2", "t2u_model.model.decoder.layers.0.conv2.bias", ADDED_ONCE),
        ("seamless_m4t_v2", "speech_encoder.encoder.layers.0.conv_module.depthwise_layer_norm.weight", NEEDS_SUM),
        ("audioflamingo3", "multi_modal_projector.linear_2.bias", ADDED_ONCE),
        ("glmasr", "audio_tower.layers.0.mlp.fc2.bias", ADDED_ONCE),
    ],
)
def test_marks(name: str, tensor: str, note: str) -> None:
    assert rule_of(table_for(TINY[name]), tensor).note == note


@pytest.mark.parametrize(
    ("class_name", "there", "absent"),
    [
        ("SeamlessM4TForTextToText", ("text_encoder", "text_decoder"), ("speech_encoder", "t2u_model")),
        ("SeamlessM4TForSpeechToText", ("speech_encoder", "text_decoder"), ("text_encoder", "t2u_model")),
        ("SeamlessM4TForTextToSpeech", ("text_encoder", "text_decoder", "t2u_model"), ("speech_encoder",)),
    ],
)
def test_the_class_says_which_parts_a_seamless_checkpoint_holds(
    class_name: str, there: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    table = table_for({**TINY["seamless_m4t"], "architectures": [class_name]})
    optional: Mapping[str, bool] = {
        stack.pairs[0][0].split(".")[0]: stack.optional for stack in table.stacks if stack.pairs[0][0]
    }
    assert not any(optional[part] for part in there)
    assert all(optional[part] for part in absent)


def test_experts_of_muse_spark_are_shared_out_whole() -> None:
    config: Config = {**TEXT, "model_type": "muse_spark_text", "head_dim": 4, "num_local_experts": 6,
                      "moe_hidden_size": 20, "moe_intermediate_size": 12}  # fmt: skip
    name = "model.layers.0.mlp.experts.gate_up_proj"
    dims = rule_of(table_for(config), name).dims
    assert isinstance(dims[0], Dim) and dims[1:] == (24, 20)
    assert [rows(config, name, 0, 3, rank) for rank in range(3)] == [[(0, 2)], [(2, 4)], [(4, 6)]]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["speech", "seq2seq"])
def test_every_speech_model_conforms(task: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from zoo.conformance import check

    known = ("audioflamingo3", "cohere_asr", "fun_asr_nano", "glmasr", "musicflamingo", "omniasr", "qwen3_asr",
             "seamless_m4t", "seamless_m4t_v2", "vibevoice", "vibevoice_asr")  # fmt: skip
    import zoo

    for model_type in sorted(set(known) & set(zoo.architectures(task))):
        out = check(model_type, tmp_path / model_type, task=task, degrees=(2, 3), run_at=(3,))
        assert not out.problems, (model_type, out.problems)
        assert out.error is not None, (model_type, out.unsupported)
