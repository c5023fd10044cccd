"""transformers' distributed checkpoints: torch's sharded safetensors, which ``from_pretrained`` loads at any degree.

``AutoModelForCausalLM.from_pretrained(OUT, distributed_config=DistributedConfig(tp_size=N))`` under torchrun, where N
need not be the degree of the files. Names are those of the modules in memory, which are not always the checkpoint's:
loading such files renames nothing and stacks no experts, as loading a checkpoint does.

Source: transformers 5.24 ``distributed/checkpoint.py`` and ``conversion_mapping.py``, torch 2.13
``distributed/checkpoint/hf_storage.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from tpshard.errors import DamagedError, UnsupportedError, short
from tpshard.exporting.enginetable import PLAIN, EngineTable, Entry, Version
from tpshard.exporting.grid import Grid, Rank
from tpshard.exporting.parts import Model

ENGINE = "transformers"
SUMMARY = "torch's sharded safetensors, loaded by transformers with a distributed_config at any degree"
VERSIONS = (Version("5.24", "loaded by transformers 5.24.0 under gloo at the same and at other degrees"),)

PATTERN = re.compile(r"shard-(?P<tp>\d{5})-model-(?P<part>\d{5})-of-\d{5}\.safetensors")
FIRST = 1

SHARDING = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"

EXPERTS = (
    Entry("expert_gate expert_up", "{parent}.gate_up_proj", form=PLAIN, kinds=("weight",)),
    Entry("expert_up", "{parent}.up_proj", form=PLAIN, kinds=("weight",)),
    Entry("expert_down", "{parent}.down_proj", form=PLAIN, kinds=("weight",)),
)

_MIXTRAL = ((".block_sparse_moe.", ".mlp."),)
_BESIDE_LANGUAGE = (
    ("^language_model.model.", "model.language_model."),
    ("^language_model.lm_head.", "lm_head."),
    ("^vision_tower.", "model.vision_tower."),
    ("^vision_model.", "model.vision_model."),
    ("^image_tower.", "model.image_tower."),
    ("^video_tower.", "model.video_tower."),
    ("^multi_modal_projector.", "model.multi_modal_projector."),
    ("^image_newline", "model.image_newline"),
)
_VISUAL = (
    ("^model.embed_tokens.", "model.language_model.embed_tokens."),
    ("^model.layers.", "model.language_model.layers."),
    ("^model.norm.", "model.language_model.norm."),
    ("^visual.", "model.visual."),
)

RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "AyaVisionForConditionalGeneration": _BESIDE_LANGUAGE,
    "ExaoneMoeForCausalLM": ((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
    "Ernie4_5_MoeForCausalLM": ((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
    "GPTNeoXForCausalLM": (("^embed_out.", "lm_head."),),
    "Gemma3ForConditionalGeneration": _BESIDE_LANGUAGE,
    "GotOcr2ForConditionalGeneration": _BESIDE_LANGUAGE,
    "InternVLForConditionalGeneration": _BESIDE_LANGUAGE,
    "Lfm3ForCausalLM": ((".self_attn.gate_proj.", ".self_attn.g_proj."),),
    "LlavaForConditionalGeneration": _BESIDE_LANGUAGE,
    "LlavaNextForConditionalGeneration": _BESIDE_LANGUAGE,
    "LlavaNextVideoForConditionalGeneration": _BESIDE_LANGUAGE,
    "LlavaOnevisionForConditionalGeneration": _BESIDE_LANGUAGE,
    "MiMoV2FlashForCausalLM": ((".self_attn.attention_sink_bias", ".self_attn.sinks"),),
    "MiniMaxForCausalLM": _MIXTRAL,
    "MiniMaxM2ForCausalLM": _MIXTRAL,
    "Mistral3ForConditionalGeneration": _BESIDE_LANGUAGE,
    "MixtralForCausalLM": _MIXTRAL,
    "MllamaForConditionalGeneration": _BESIDE_LANGUAGE,
    "NemotronHForCausalLM": (("^backbone.", "model."),),
    "PaliGemmaForConditionalGeneration": _BESIDE_LANGUAGE,
    "PhimoeForCausalLM": ((".block_sparse_moe.gate.", ".mlp.router."), *_MIXTRAL),
    "Qwen2VLForConditionalGeneration": _VISUAL,
    "Qwen2_5_VLForConditionalGeneration": _VISUAL,
    "VideoLlavaForConditionalGeneration": _BESIDE_LANGUAGE,
    "VipLlavaForConditionalGeneration": _BESIDE_LANGUAGE,
}
"""What a class calls otherwise in memory than in its checkpoints (a part of transformers' conversion mapping)."""

UNLIKE = frozenset(
    {
        "AXK1ForCausalLM", "AXK2ForCausalLM", "AriaForConditionalGeneration", "AriaTextForCausalLM",
        "AudioFlamingo3ForConditionalGeneration", "BailingHybridForCausalLM", "BlipForConditionalGeneration",
        "Cosmos3EdgeForConditionalGeneration", "Cosmos3OmniForConditionalGeneration",
        "DeepseekOcr2ForConditionalGeneration", "DeepseekV4ForCausalLM", "DiffusionGemmaForBlockDiffusion",
        "DoryForCausalLM", "Dots3NoteForConditionalGeneration", "Emu3ForConditionalGeneration", "EncoderDecoderModel",
        "Ernie4_5_VLMoeForConditionalGeneration", "EsmForMaskedLM", "FlintForCausalLM", "FuyuForCausalLM",
        "Glm5NextForConditionalGeneration", "GlmAsrForConditionalGeneration", "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteSpeechForConditionalGeneration",
        "GraniteSpeechPlusForConditionalGeneration", "GteForMaskedLM", "HYV3ForCausalLM", "HYV4ForCausalLM",
        "HYV4VLForConditionalGeneration", "HrmTextForCausalLM", "HunYuanVLForConditionalGeneration",
        "HyperCLOVAXVisionV2ForConditionalGeneration", "Inkling2ForCausalLM", "Inkling2ForConditionalGeneration",
        "Inkling2LoopForCausalLM", "Inkling2LoopForConditionalGeneration", "JinaEmbeddingsV3ForMaskedLM",
        "KimiLinearForCausalLM", "Kimi_K25ForConditionalGeneration", "Kolibri1ForCausalLM", "LagunaForCausalLM",
        "LaraMiniForCausalLM", "Lfm3VlForConditionalGeneration", "LongcatFlashForCausalLM", "MarianMTModel",
        "MiniMaxM3SparseForConditionalGeneration", "MistralLarge4ForConditionalGeneration",
        "Molmo2ForConditionalGeneration", "MusicFlamingoForConditionalGeneration", "NomicBertForMaskedLM",
        "OlmoHybridForCausalLM", "PI0ForConditionalGeneration", "PaddleOCRVLForConditionalGeneration",
        "QianfanOCRForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
        "Qwen2_5OmniThinkerForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Step3p7ForConditionalGeneration",
        "T5Gemma2ForConditionalGeneration", "T5GemmaForConditionalGeneration", "UdopForConditionalGeneration",
        "UltraVBertForMaskedLM", "UltrabertForMaskedLM", "UnlimitedOcrForConditionalGeneration",
        "VibeVoiceAsrForConditionalGeneration", "VoxtralForConditionalGeneration",
        "VoxtralRealtimeForConditionalGeneration", "Zamba2ForCausalLM", "ZambaForCausalLM",
    }
)  # fmt: skip
"""Classes whose other names, fusions or copies in memory are not said here."""


def table(model: Model, version: str) -> EngineTable:
    """What transformers stores of a model: everything, chunked.

    Raises:
        UnsupportedError: the class has other names in memory than in its checkpoints, and they are not known here.
    """
    name = model.architecture
    if name in UNLIKE or _names_bias_twice(model):
        raise UnsupportedError(
            f"{name or 'this model'} has other names in memory than in its checkpoints, and transformers loads "
            "distributed checkpoints by those in memory, which are not known here; load the checkpoint itself: "
            "transformers cuts it while loading"
        )
    return EngineTable(
        EXPERTS,
        file_name,
        most=(1, 1),
        rename=renamed(name),
        chunked=True,
        metadata={"format": "pt", "DCP_VERSION": "1.0"},
        described=described,
    )


def renamed(architecture: str) -> tuple[tuple[str, str], ...]:
    """What a class calls otherwise in memory than in its checkpoints, by the vocabulary of a table's ``rename``."""
    return RENAMED.get(architecture, ())


def _names_bias_twice(model: Model) -> bool:
    """Whether the bias of a head for masked words is in memory under the name of its last matrix, too."""
    names = {tensor.name for tensor in model.tensors}
    beside = {"lm_head.dense.weight", "lm_head.decoder.weight", "lm_head.layer_norm.weight"}
    if any(name.endswith("predictions.bias") for name in names):
        return True
    return "lm_head.bias" in names and not names.isdisjoint(beside)


def file_name(grid: Grid, rank: Rank, part: int, parts: int) -> str:
    """``shard-00001-model-00001-of-00001.safetensors``: ranks and parts are counted from 1."""
    return f"shard-{rank.tp + 1:05d}-model-{part + 1:05d}-of-{parts:05d}.safetensors"


def described(origins: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Where every tensor of a file begins in the whole one: torch takes the sizes from that and the shapes."""
    return {SHARDING: json.dumps({name: {OFFSETS: list(origin)} for name, origin in origins.items()})}


def origins_of(metadata: Mapping[str, str], file: str) -> dict[str, tuple[int, ...]]:
    """What :func:`described` wrote.

    Raises:
        DamagedError: it is missing or something else.
    """
    try:
        found = {name: told[OFFSETS] for name, told in json.loads(metadata[SHARDING]).items()}
        if any(type(at) is not int for origin in found.values() for at in origin):
            raise TypeError("an offset is no whole number")
        return {name: tuple(origin) for name, origin in found.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        told = f"{SHARDING!r} does not say where its tensors begin"
        raise DamagedError(f"{short(file)}: {told}; it is no shard of a distributed checkpoint, or damaged") from None
