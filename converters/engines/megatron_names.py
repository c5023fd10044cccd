"""What Megatron-Core calls the parts of a GPT, which both of its checkpoint formats share.

With Transformer Engine norms belong to the matrix behind them (``linear_qkv.layer_norm_weight``); the local layers have
them as modules. Experts are matrices of one grouped module (``linear_fc1.weight3``), or modules (``local_experts.3``).

Source: megatron-core 0.16.1 ``core/models/gpt/gpt_layer_specs.py``, ``core/transformer/attention.py``, ``mlp.py``,
``moe/experts.py``, ``multi_latent_attention.py``; Megatron-Bridge ``llama_bridge.py``, ``qwen3_moe_bridge.py``,
``deepseek/common.py``.
"""

from __future__ import annotations

from tpshard.errors import UnsupportedError
from tpshard.exporting.enginetable import GROUPED, WHOLE, Entry
from tpshard.exporting.parts import Model, Part

LAYER = "decoder.layers.{layer}"


def ends() -> tuple[Entry, ...]:
    """What is outside the layers."""
    return (
        Entry("embed", "embedding.word_embeddings.{kind}"),
        Entry("position", "embedding.position_embeddings.{kind}", form=WHOLE),
        Entry("head", "output_layer.{kind}"),
        Entry("norm norm", "decoder.final_layernorm.{kind}"),
    )


def norms(
    model: Model, fused: bool, layer: str = LAYER, *, before_experts: bool = True
) -> tuple[Entry, ...]:
    """The norms of a layer; ``fused``: below the matrix behind them, as Transformer Engine has them.

    ``before_experts``: the norm before experts is a module of its own, as several matrices are behind it.
    """
    latent, mixed = "kv_a" in model.words, expert_layers(model)
    entries = [Entry("norm q_norm", f"{layer}.self_attention.q_layernorm.{{kind}}"),
               Entry("norm k_norm", f"{layer}.self_attention.k_layernorm.{{kind}}")]  # fmt: skip
    before_qkv, before_fc1 = "input_layernorm.{kind}", "pre_mlp_layernorm.{kind}"
    queries, keys = "q_layernorm.{kind}", "kv_layernorm.{kind}"
    if fused:
        before_qkv = before_qkv if latent else "self_attention.linear_qkv.layer_norm_{kind}"
        queries, keys = "linear_q_up_proj.layer_norm_{kind}", "linear_kv_up_proj.layer_norm_{kind}"
        before_fc1 = "mlp.linear_fc1.layer_norm_{kind}"
        if before_experts:
            entries.append(Entry("norm post_attention_layernorm", f"{layer}.pre_mlp_layernorm.{{kind}}", layers=mixed))
    return (
        *entries,
        Entry("norm input_layernorm", f"{layer}.{before_qkv}"),
        Entry("norm post_attention_layernorm", f"{layer}.{before_fc1}"),
        Entry("norm q_a_layernorm", f"{layer}.self_attention.{queries}"),
        Entry("norm kv_a_layernorm", f"{layer}.self_attention.{keys}"),
    )


def attention(layer: str = LAYER) -> tuple[Entry, ...]:
    """Queries, keys and values group by group in one matrix, or DeepSeek's latent attention in five."""
    at = f"{layer}.self_attention"
    return (
        Entry("q_a", f"{at}.linear_q_down_proj.{{kind}}"),
        Entry("q_b", f"{at}.linear_q_up_proj.{{kind}}"),
        Entry("q", f"{at}.linear_q_proj.{{kind}}", needs="kv_a"),
        Entry("kv_a", f"{at}.linear_kv_down_proj.{{kind}}"),
        Entry("kv_b", f"{at}.linear_kv_up_proj.{{kind}}"),
        Entry("q k v", f"{at}.linear_qkv.{{kind}}", form=GROUPED),
        Entry("o", f"{at}.linear_proj.{{kind}}"),
    )


def router(layer: str = LAYER) -> tuple[Entry, ...]:
    """What chooses experts, the correction of the choice, and the gate of the shared ones."""
    return (
        Entry("router", f"{layer}.mlp.router.{{kind}}", form=WHOLE),
        Entry("router", f"{layer}.mlp.router.expert_bias", kinds=("",), form=WHOLE),
        Entry("shared_router", f"{layer}.mlp.shared_experts.gate_weight", kinds=("weight",), form=WHOLE),
    )


def expert_layers(model: Model) -> frozenset[int]:
    """The layers that have routed experts."""
    return frozenset(part.layer for part in model.parts if part.word == "router" and part.layer is not None)


def gated(model: Model) -> bool:
    """Whether feed-forwards have a gate (``gated_linear_unit``)."""
    return bool(model.words & {"gate", "expert_gate"})


def dropped(part: Part, model: Model) -> str:
    """Why a part has no place in the files, "" where it has."""
    if part.layer is not None and part.layer >= model.layers:
        return "a prediction layer, which Megatron has in a module of its own (mtp) that this layout does not write"
    return ""


def rows(vocab: int, tp_size: int) -> int:
    """The vocabulary is padded to a multiple of 128 for every rank (``--make-vocab-size-divisible-by``)."""
    return -(-vocab // (128 * tp_size)) * 128


def require_equal_experts(model: Model, ep_size: int) -> None:
    """Raise UnsupportedError where groups of experts would be unequal."""
    if model.experts and model.experts % ep_size:
        fit = [str(size) for size in range(1, model.experts + 1) if model.experts % size == 0]
        raise UnsupportedError(
            f"Megatron has as many experts in every group, and {ep_size} do not divide {model.experts}; choose --ep "
            f"{', '.join(fit)}"
        )
