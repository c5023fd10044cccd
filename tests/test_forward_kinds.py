"""The forward level on models that are more than decoders of text: what each takes is made up from its signature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import transformers as T  # noqa: E402
from damaged import Sharded, flip_lowest_bit, points  # noqa: E402

from tpshard.errors import UnsupportedError  # noqa: E402
from tpshard.numerics.results import results_of  # noqa: E402
from tpshard.selftest import models  # noqa: E402

BART = {
    "d_model": 32, "vocab_size": 96, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {"d_model": 32, "vocab_size": 96, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 48}
# fmt: off
WHISPER = {**BART, "max_source_positions": 8, "max_target_positions": 64, "num_mel_bins": 4, "pad_token_id": 0,
           "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# fmt: on
BERT = {
    "hidden_size": 32, "vocab_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


class Kind(NamedTuple):
    """A class with its config, what it takes beside a mask, sums and gathers of a pass, and a tensor that they need."""

    cls: Any
    config: Callable[[], Any]
    takes: set[str]
    collectives: tuple[int, int]
    tensor: str


KINDS = {
    "cross attention": Kind(
        T.BartForCausalLM, lambda: T.BartConfig(**BART), {"input_ids", "encoder_hidden_states"}, (4, 1),
        "model.decoder.layers.0.encoder_attn.out_proj.weight",
    ),
    "encoder's outputs": Kind(
        T.WhisperForCausalLM, lambda: T.WhisperConfig(**WHISPER), {"input_ids", "encoder_outputs"}, (4, 1),
        "model.decoder.layers.0.encoder_attn.v_proj.weight",
    ),
    "encoder-decoder": Kind(
        T.BartForConditionalGeneration, lambda: T.BartConfig(**BART), {"input_ids", "decoder_input_ids"}, (7, 1),
        "model.encoder.layers.0.fc2.weight",
    ),
    "position biases": Kind(
        T.T5ForConditionalGeneration, lambda: T.T5Config(**T5), {"input_ids", "decoder_input_ids"}, (7, 1),
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    "computed sinusoids": Kind(
        T.MarianMTModel, lambda: T.MarianConfig(**BART, pad_token_id=0), {"input_ids", "decoder_input_ids"}, (7, 1),
        "model.decoder.layers.0.encoder_attn.q_proj.weight",
    ),
    "bare": Kind(
        T.BartModel, lambda: T.BartConfig(**BART), {"input_ids", "decoder_input_ids"}, (7, 0),
        "encoder.layers.0.self_attn.v_proj.weight",
    ),
    "masked": Kind(
        T.BertForMaskedLM, lambda: T.BertConfig(**BERT), {"input_ids"}, (3, 1),
        "bert.encoder.layer.0.output.dense.weight",
    ),
    "speech": Kind(
        T.WhisperForConditionalGeneration, lambda: T.WhisperConfig(**WHISPER), {"input_features", "decoder_input_ids"},
        (6, 1), "model.encoder.layers.0.self_attn.out_proj.weight",
    ),
    "codebooks": Kind(
        T.MusicgenForCausalLM,
        lambda: T.models.musicgen.configuration_musicgen.MusicgenDecoderConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, ffn_dim=48, num_codebooks=2,
            pad_token_id=60, bos_token_id=60,
        ),
        {"input_ids", "encoder_hidden_states"}, (5, 2), "model.decoder.embed_tokens.1.weight",
    ),
    "vision": Kind(
        T.CLIPVisionModel, lambda: T.CLIPVisionConfig(**VISION), {"pixel_values"}, (2, 0),
        "vision_model.encoder.layers.0.mlp.fc2.weight",
    ),
    "two models": Kind(
        T.EncoderDecoderModel,
        lambda: T.EncoderDecoderConfig.from_encoder_decoder_configs(T.BertConfig(**BERT), T.BertConfig(**BERT)),
        {"input_ids", "decoder_input_ids"}, (7, 1), "decoder.bert.encoder.layer.0.crossattention.self.value.weight",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Path]:
    kind, directory = KINDS[request.param], tmp_path_factory.mktemp("kind") / "model"
    models.build(kind.config(), 3, torch.float32, kind.cls).save_pretrained(directory)
    return kind, directory


def test_it_passes_and_every_parameter_is_reached(made: tuple[Kind, Path], tmp_path: Path) -> None:
    kind, source = made
    verdict = Sharded(source, tmp_path, 3).verify(tokens=8, mode="zero-pad")
    assert verdict.verdict == "passed", [finding.message for finding in verdict.findings]
    assert verdict.coverage == 1.0, verdict.unreached
    sums, gathers = kind.collectives
    assert (verdict.collectives.get("all_reduce", 0), verdict.collectives.get("all_gather", 0)) == (sums, gathers)
    assert max(measure.error for measure in verdict.measures) < 1e-13


def test_a_wrong_bit_is_found(made: tuple[Kind, Path], tmp_path: Path) -> None:
    kind, source = made
    shards = Sharded(source, tmp_path, 2)
    name = next(n for n in _stored(source) if n.endswith(kind.tensor.removeprefix("vision_model.")))
    shards.change(1, name, flip_lowest_bit(1, 1))
    verdict = shards.verify(tokens=8, mode="zero-pad")
    assert verdict.verdict == "failed"
    assert points(verdict)


def _stored(source: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(str(source / "model.safetensors"), "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_what_each_takes(kind: Kind) -> None:
    """The arguments are those of the signature, and a model on the meta device is enough to tell them."""
    from tpshard.numerics.arguments import arguments_of
    from tpshard.numerics.loss import Sequences

    with torch.device("meta"):
        skeleton = _Bare(kind.cls._from_config(kind.config()))
    inputs = arguments_of(skeleton, Sequences(3, 6, 0))  # type: ignore[arg-type]
    assert set(inputs) - {"attention_mask", "use_cache"} == kind.takes
    for value in inputs.values():
        first = value[0] if isinstance(value, tuple) else value
        assert isinstance(first, bool) or first.shape[0] % 3 == 0


class _Bare:
    """As much of a skeleton as its arguments are told from."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.recipes = self.parameters
        self.modules = dict(model.named_modules())


def test_what_cannot_be_made_up_is_named() -> None:
    from tpshard.numerics.arguments import arguments_of
    from tpshard.numerics.loss import Sequences

    with torch.device("meta"):
        model = T.CLIPVisionModel._from_config(T.CLIPVisionConfig(**VISION))
    model.config.image_size = None
    with pytest.raises(UnsupportedError, match=r"CLIPVisionModel takes pixel_values, and config.json has no number"):
        arguments_of(_Bare(model), Sequences(1, 4, 0))  # type: ignore[arg-type]


def test_outputs_are_sorted() -> None:
    hidden, pooled, logits = torch.zeros(1, 2, 3), torch.zeros(1, 3), torch.zeros(1, 2, 5)
    found = results_of({"pooler_output": pooled, "last_hidden_state": hidden})
    assert found.main is hidden and not found.are_logits and found.others[0] is pooled
    ids = torch.zeros(2).long()
    found = results_of({"loss": None, "hidden_states": (hidden, hidden), "logits": logits, "ids": ids})
    assert found.main is logits and found.are_logits and len(found.others) == 2
    with pytest.raises(TypeError, match="no numbers"):
        results_of({"ids": torch.zeros(2).long()})
