"""Tiny checkpoints for engine layouts, with names and shapes written out: no table takes part in making them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

HIDDEN, HEADS, KV, SIZE, FFN, VOCAB, LAYERS, EXPERTS = 24, 8, 2, 4, 32, 131, 5, 5


def config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    """A config.json; ``more`` overrides the sizes above."""
    return {
        "architectures": [architecture], "model_type": model_type, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "head_dim": SIZE, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB, "tie_word_embeddings": False, "torch_dtype": "float32", **more,
    }  # fmt: skip


class Maker:
    """Draws tensors under their names."""

    def __init__(self, seed: int = 0) -> None:
        self.random, self.tensors = np.random.default_rng(seed), Tensors()

    def draw(self, name: str, *shape: int) -> None:
        self.tensors[name] = self.random.standard_normal(shape, np.float32)

    def attention(self, at: str, *, kv: int = KV, bias: bool = False, norms: bool = False) -> None:
        for name, heads in (("q", HEADS), ("k", kv), ("v", kv)):
            self.draw(f"{at}.{name}_proj.weight", heads * SIZE, HIDDEN)
            if bias:
                self.draw(f"{at}.{name}_proj.bias", heads * SIZE)
        self.draw(f"{at}.o_proj.weight", HIDDEN, HEADS * SIZE)
        if norms:
            self.draw(f"{at}.q_norm.weight", SIZE)
            self.draw(f"{at}.k_norm.weight", SIZE)

    def mlp(self, at: str, ffn: int = FFN, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        gate, up, down = names
        self.draw(f"{at}.{gate}.weight", ffn, HIDDEN)
        self.draw(f"{at}.{up}.weight", ffn, HIDDEN)
        self.draw(f"{at}.{down}.weight", HIDDEN, ffn)

    def ends(self, *, tied: bool = False) -> None:
        self.draw("model.embed_tokens.weight", VOCAB, HIDDEN)
        self.draw("model.norm.weight", HIDDEN)
        if not tied:
            self.draw("lm_head.weight", VOCAB, HIDDEN)

    def norms(self, at: str) -> None:
        self.draw(f"{at}.input_layernorm.weight", HIDDEN)
        self.draw(f"{at}.post_attention_layernorm.weight", HIDDEN)

    def written(self, directory: Path, values: Mapping[str, Any]) -> Path:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(dict(values)))
        (directory / "tokenizer.json").write_text("{}")
        save_file(self.tensors, directory / "model.safetensors", {"format": "pt"})
        return directory


def llama(directory: Path, *, tied: bool = False, kv: int = KV, model_type: str = "llama", bias: bool = False,
          norms: bool = False) -> tuple[Path, Tensors]:  # fmt: skip
    """A Llama, or with ``model_type`` qwen2 (biases) or qwen3 (norms of heads)."""
    make = Maker()
    make.ends(tied=tied)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        make.attention(f"{at}.self_attn", kv=kv, bias=bias, norms=norms)
        make.mlp(f"{at}.mlp")
        make.norms(at)
    named = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]
    values = config(named, model_type, num_key_value_heads=kv, tie_word_embeddings=tied)
    return make.written(directory, values), make.tensors


def qwen3_moe(directory: Path, *, stacked: bool = False) -> tuple[Path, Tensors]:
    """Experts in every layer but the first; with ``stacked`` as transformers 5 holds them."""
    make = Maker(1)
    make.ends()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        make.attention(f"{at}.self_attn", norms=True)
        make.norms(at)
        if layer == 0:
            make.mlp(f"{at}.mlp")
            continue
        make.draw(f"{at}.mlp.gate.weight", EXPERTS, HIDDEN)
        if stacked:
            make.draw(f"{at}.mlp.experts.gate_up_proj", EXPERTS, 2 * FFN, HIDDEN)
            make.draw(f"{at}.mlp.experts.down_proj", EXPERTS, HIDDEN, FFN)
        else:
            for expert in range(EXPERTS):
                make.mlp(f"{at}.mlp.experts.{expert}")
    values = config(
        "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=EXPERTS, moe_intermediate_size=FFN, mlp_only_layers=[0],
        decoder_sparse_step=1,
    )  # fmt: skip
    return make.written(directory, values), make.tensors


def mixtral(directory: Path) -> tuple[Path, Tensors]:
    """Experts in every layer, named as in its release."""
    make = Maker(3)
    make.ends()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        make.attention(f"{at}.self_attn")
        make.norms(at)
        make.draw(f"{at}.block_sparse_moe.gate.weight", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            make.mlp(f"{at}.block_sparse_moe.experts.{expert}", names=("w1", "w3", "w2"))
    values = config("MixtralForCausalLM", "mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2)
    return make.written(directory, values), make.tensors


LATENT, QUERY_LATENT, NOPE, ROPE, VALUE = 12, 20, 4, 2, 6


def deepseek_v3(directory: Path, *, predicted: int = 1) -> tuple[Path, Tensors]:
    """Latent attention, one dense layer, then experts; ``predicted`` layers past the last."""
    make = Maker(2)
    make.ends()
    for layer in range(LAYERS + predicted):
        at = f"model.layers.{layer}"
        make.norms(at)
        own = f"{at}.self_attn"
        make.draw(f"{own}.q_a_proj.weight", QUERY_LATENT, HIDDEN)
        make.draw(f"{own}.q_a_layernorm.weight", QUERY_LATENT)
        make.draw(f"{own}.q_b_proj.weight", HEADS * (NOPE + ROPE), QUERY_LATENT)
        make.draw(f"{own}.kv_a_proj_with_mqa.weight", LATENT + ROPE, HIDDEN)
        make.draw(f"{own}.kv_a_layernorm.weight", LATENT)
        make.draw(f"{own}.kv_b_proj.weight", HEADS * (NOPE + VALUE), LATENT)
        make.draw(f"{own}.o_proj.weight", HIDDEN, HEADS * VALUE)
        if layer < 1:
            make.mlp(f"{at}.mlp")
            continue
        make.draw(f"{at}.mlp.gate.weight", EXPERTS, HIDDEN)
        make.draw(f"{at}.mlp.gate.e_score_correction_bias", EXPERTS)
        make.mlp(f"{at}.mlp.shared_experts", 16)
        for expert in range(EXPERTS):
            make.mlp(f"{at}.mlp.experts.{expert}", 16)
        if layer >= LAYERS:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                make.draw(f"{at}.{name}.weight", HIDDEN)
            make.draw(f"{at}.eh_proj.weight", HIDDEN, 2 * HIDDEN)
            make.draw(f"{at}.shared_head.head.weight", VOCAB, HIDDEN)
            make.draw(f"{at}.embed_tokens.weight", VOCAB, HIDDEN)
    values = config(
        "DeepseekV3ForCausalLM", "deepseek_v3", num_key_value_heads=HEADS, kv_lora_rank=LATENT, head_dim=ROPE,
        q_lora_rank=QUERY_LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE,
        n_routed_experts=EXPERTS, n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1,
        num_nextn_predict_layers=predicted, topk_method="noaux_tc",
    )  # fmt: skip
    return make.written(directory, values), make.tensors


def read_all(directory: Path) -> dict[str, Tensors]:
    """Every safetensors file below a directory."""
    from safetensors.numpy import load_file

    return {str(path.relative_to(directory)): load_file(path) for path in sorted(directory.rglob("*.safetensors"))}
