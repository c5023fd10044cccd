"""Tiny checkpoints, made on the spot with transformers' own classes, under the names that released files have.

Every parameter is random, norms and biases too: with fresh values (norms 1, biases 0) a bias counted
twice or a norm cut wrongly changes no number. Weights are bfloat16, as released ones are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

# fmt: off
_SMALL = {"num_hidden_layers": 2, "vocab_size": 96}
_MHA = _SMALL | {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
_PAIR = _MHA | {"num_key_value_heads": 2}
_GQA = _SMALL | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 64}
_WIDE = _GQA | {"head_dim": 12}  # a head size that is not hidden / heads
_ODD = {"vocab_size": 101}  # divides by no degree: padding
_MOE = {"num_experts_per_tok": 2}
_MLA = _SMALL | {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_routed_experts": 12, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, **_MOE,
}


class Family(NamedTuple):
    """A model of the zoo: what it is there for, its config, and the degrees at which faults are planted."""

    says: str
    config: Callable[[], Any]
    degrees: tuple[int, ...] = (2, 4)


def _t(name: str, **values: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Config")(**values)


FAMILIES: dict[str, Family] = {  # cheapest first
    "llama": Family("grouped queries, 4 ranks share 2 KV heads", _t(
        "Llama", **(_GQA | _ODD), tie_word_embeddings=False
    )),
    "qwen2": Family("biases of q, k, v", _t("Qwen2", **_GQA, tie_word_embeddings=False)),
    "qwen3": Family("norms of every head, tied head, heads wider than hidden", _t(
        "Qwen3", **_WIDE, tie_word_embeddings=True
    )),
    "gpt_neox": Family("q, k, v fused head by head, biases", _t("GPTNeoX", **_MHA, rotary_pct=0.5)),
    "phi3": Family("q, k, v and gate, up fused in blocks", _t("Phi3", **_PAIR, pad_token_id=0)),
    "gpt2": Family("matrices stored in x out", _t(
        "GPT2", n_embd=32, n_head=4, n_layer=2, vocab_size=97, n_positions=64
    )),
    "opt": Family("biases everywhere, learned positions", _t(
        "OPT", **_SMALL, hidden_size=32, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32,
        max_position_embeddings=64,
    )),
    "starcoder2": Family("a two-matrix feed-forward with biases", _t("Starcoder2", **_GQA)),
    "falcon": Family("fused group by group, one block for attention and feed-forward", _t(
        "Falcon", **_SMALL, hidden_size=64, num_attention_heads=8, num_kv_heads=2, new_decoder_architecture=True,
        bias=True,
    )),
    "gemma2": Family("norms after blocks, soft caps, sliding window", _t("Gemma2", **(_WIDE | _ODD), sliding_window=4)),
    "olmo2": Family("norms over all heads at once", _t("Olmo2", **_MHA)),
    "mixtral": Family("experts, w1 and w3", _t("Mixtral", **_GQA, num_local_experts=5, **_MOE)),
    "qwen3_moe": Family("12 experts, whose text order is another", _t(
        "Qwen3Moe", **_WIDE, num_experts=12, moe_intermediate_size=16, mlp_only_layers=[0], **_MOE
    )),
    "deepseek_v3": Family("latent attention, shared experts", _t("DeepseekV3", **_MLA, n_shared_experts=1)),
    "gpt_oss": Family("sinks, alternating gate and up, stacked experts", _t(
        "GptOss", **(_PAIR | _ODD | {"intermediate_size": 32}), head_dim=8, num_local_experts=5, **_MOE
    )),
    "mamba2": Family("state space", _t(
        "Mamba2", **_SMALL, hidden_size=32, num_heads=8, head_dim=8, expand=2, state_size=8, n_groups=2, chunk_size=8,
        tie_word_embeddings=False,
    ), (2,)),
}
# fmt: on


def randomise(model: Any, seed: int) -> None:
    """Give every parameter and float buffer of weights random values, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.dtype)

    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.dim() <= 1 or "norm" in key:
                if value.is_floating_point() and ("correction" in key or isinstance(value, torch.nn.Parameter)):
                    value.add_(noise(value) * 0.3)
            elif isinstance(value, torch.nn.Parameter):
                value.copy_(noise(value) * 0.2)


def build(config: Any, seed: int, dtype: torch.dtype = torch.bfloat16, architecture: Any = None) -> Any:
    """A language model of the config, in evaluation mode, all parameters random.

    ``architecture`` is its class, where the config alone does not say it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (architecture or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])(config)
    randomise(model, seed)
    return model.to(dtype).eval()


def write(name: str, directory: Path, seed: int = 0) -> None:
    """Save the model ``name`` of :data:`FAMILIES` as released checkpoints are."""
    build(FAMILIES[name].config(), seed).save_pretrained(directory)
