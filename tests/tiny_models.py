"""Tiny checkpoints of every family, made on the spot under the names that released files have.

Every parameter is random, norms and biases too: with fresh values (norms 1, biases 0) a bias counted
twice or a norm cut wrongly changes no number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers as T
from safetensors.torch import load_file

from tpshard.selftest import models

T.logging.disable_progress_bar()
torch.set_num_threads(1)  # matrices of 32 x 32: threads only wait for each other

# fmt: off
SMALL = {"num_hidden_layers": 2, "vocab_size": 96}
MHA = SMALL | {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
PAIR = MHA | {"num_key_value_heads": 2}
GQA = SMALL | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 64}
OWN = GQA | {"head_dim": 12}  # a head size that is not hidden / heads
MOE = {"num_experts_per_tok": 2}
MLA = SMALL | {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_routed_experts": 12, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, **MOE,
}
FALCON = SMALL | {"hidden_size": 64, "num_attention_heads": 8}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96, "n_positions": 64}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14, "vision_use_head": False}
YES, NO = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaConfig(**GQA, **NO),
    "llama-wide-heads": lambda: T.LlamaConfig(**OWN, **YES),
    "llama-biases": lambda: T.LlamaConfig(**GQA, **NO, attention_bias=True, mlp_bias=True),
    "llama-vocab-101": lambda: T.LlamaConfig(**(GQA | {"vocab_size": 101}), **NO),
    "mistral": lambda: T.MistralConfig(**OWN),
    "qwen2": lambda: T.Qwen2Config(**GQA, **NO),
    "qwen3": lambda: T.Qwen3Config(**OWN, **YES),
    "smollm3": lambda: T.SmolLM3Config(**GQA, pad_token_id=0),
    "granite": lambda: T.GraniteConfig(**GQA, **NO),
    "cwm": lambda: T.CwmConfig(**OWN),
    "helium": lambda: T.HeliumConfig(**GQA, head_dim=8),
    "ministral": lambda: T.MinistralConfig(**OWN),
    "gemma": lambda: T.GemmaConfig(**OWN),
    "gemma2": lambda: T.Gemma2Config(**OWN),
    "gemma3_text": lambda: T.Gemma3TextConfig(**OWN),
    "gemma3": lambda: T.Gemma3Config(text_config=OWN, vision_config=VISION, mm_tokens_per_image=4, image_token_id=95),
    "phi3": lambda: T.Phi3Config(**PAIR, pad_token_id=0),
    "gpt_neox": lambda: T.GPTNeoXConfig(**MHA),
    "falcon": lambda: T.FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True, bias=False),
    "falcon-11b": lambda: T.FalconConfig(
        **FALCON, num_kv_heads=2, new_decoder_architecture=True, num_ln_in_parallel_attn=1, bias=True
    ),
    "falcon-7b": lambda: T.FalconConfig(**FALCON, multi_query=True),
    "falcon-rw": lambda: T.FalconConfig(**FALCON, multi_query=False, alibi=True, parallel_attn=False, bias=True),
    "gpt2": lambda: T.GPT2Config(**GPT),
    "gpt_bigcode": lambda: T.GPTBigCodeConfig(**GPT),
    "gpt_bigcode-mha": lambda: T.GPTBigCodeConfig(**GPT, multi_query=False),
    "opt": lambda: T.OPTConfig(
        **SMALL, hidden_size=32, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64
    ),
    "opt-350m": lambda: T.OPTConfig(
        **SMALL, hidden_size=32, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=16, max_position_embeddings=64,
        do_layer_norm_before=False,
    ),
    "olmo": lambda: T.OlmoConfig(**GQA),
    "olmo2": lambda: T.Olmo2Config(**MHA),
    "olmo2-gqa": lambda: T.Olmo2Config(**GQA),
    "olmo3": lambda: T.Olmo3Config(**GQA),
    "mixtral": lambda: T.MixtralConfig(**GQA, num_local_experts=4, **MOE),
    "qwen2_moe": lambda: T.Qwen2MoeConfig(
        **GQA, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=24, **MOE
    ),
    "qwen3_moe": lambda: T.Qwen3MoeConfig(
        **OWN, num_experts=12, moe_intermediate_size=16, mlp_only_layers=[0], **MOE
    ),
    "deepseek_v2": lambda: T.DeepseekV2Config(
        **(MLA | {"q_lora_rank": None}), n_shared_experts=2, topk_method="greedy"
    ),
    "deepseek_v3": lambda: T.DeepseekV3Config(**MLA, n_shared_experts=1),
    "gpt_oss": lambda: T.GptOssConfig(**(PAIR | {"intermediate_size": 32}), head_dim=8, num_local_experts=4, **MOE),
    "mamba2": lambda: T.Mamba2Config(
        **SMALL, hidden_size=32, num_heads=8, head_dim=8, expand=2, state_size=8, n_groups=2, chunk_size=8
    ),
    "mamba2-one-group": lambda: T.Mamba2Config(
        **SMALL, hidden_size=32, num_heads=8, head_dim=8, expand=2, state_size=8, n_groups=1, chunk_size=8,
        use_bias=True,
    ),
    "starcoder2": lambda: T.Starcoder2Config(**GQA),
    "bert": lambda: T.BertConfig(**MHA, max_position_embeddings=64, is_decoder=True),
}
# fmt: on


def architecture(config: Any) -> Any:
    """The class that runs a config as a language model."""
    special = {"gemma3": T.Gemma3ForConditionalGeneration}
    return special.get(config.model_type) or T.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def build(name: str) -> Any:
    """The model ``name`` of :data:`MODELS` in float64, all parameters random."""
    config = MODELS[name]()
    return models.build(config, 7, torch.float64, architecture(config))


def write(name: str, directory: Path) -> dict[str, torch.Tensor]:
    """Save the model as released checkpoints are; returns the file's tensors."""
    build(name).save_pretrained(directory)
    return load_file(directory / "model.safetensors")
