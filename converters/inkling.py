"""Inkling: attention with learnt relative positions, convolutions over keys, values and residuals, sinks among experts.

Shared experts are stored as a bank; the router weighs them with the others. Sliding layers have heads of their own.
Source: transformers ``models/inkling/{modeling,configuration}_inkling.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import attention, channels_of, expert_channels, experts, gated_mlp, norms, vocabulary_of
from tpshard.blocks.experts import CORRECTION, mixed_layers
from tpshard.blocks.mixers import layers_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "inkling"
USUAL = {
    "inkling_text": {
        "vocab_size": 201_024, "hidden_size": 6144, "num_hidden_layers": 66, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16,
        "swa_head_dim": 128, "sliding_window_size": 512, "d_rel": 16, "rel_extent": 1024, "conv_kernel_size": 4,
        "intermediate_size": 24_576, "moe_intermediate_size": 3072, "n_routed_experts": 256, "n_shared_experts": 2,
    },
}  # fmt: skip
MODEL_TYPES = tuple(USUAL)


def table(c: Config) -> Table:
    c = c.with_usual(**USUAL[c.model_type])
    hidden, vocab, layers = c.count("hidden_size"), vocabulary_of(c), c.count("num_hidden_layers")
    mixed, layer = mixed_layers(c, key="dense_mlp_idx"), "@layers.{layer}"
    full = layers_of(_kinds(c, layers), "hybrid")

    count = c.count("n_routed_experts", "num_local_experts")
    t = Table(layers, count, prefixes=("model.", "model.language_model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    t.norm("@embed_tokens.embed_norm", hidden)
    t.norm("@norm", hidden)
    t.linear("lm_head", vocab, hidden, role="head")
    for of, swa, extent in ((full, "", "rel_extent"), (set(range(layers)) - full, "swa_", "sliding_window_size")):
        heads = Heads("sliding_heads" if swa else "heads", c.count(f"{swa}num_attention_heads"),
                      c.count(f"{swa}num_key_value_heads"))  # fmt: skip
        with t.only(of):
            _attention(t, c, f"{layer}.self_attn", heads, c.count(f"{swa}head_dim"), c.count(extent))
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    for name in ("attn_sconv", "mlp_sconv"):
        kernel = c.count("conv_kernel_size", "sconv_kernel_size")
        t.whole(f"{layer}.{name}.conv1d.weight", hidden, 1, kernel, why="runs along the residual stream")
    with t.only(mixed.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
        t.tensor(f"{layer}.mlp.global_scale", 1, role="buffer")
    with t.only(mixed.sparse):
        _experts(t, c, f"{layer}.mlp", hidden)
    return t


def _attention(t: Table, c: Config, at: str, heads: Heads, size: int, extent: int) -> None:
    hidden, kernel = c.count("hidden_size"), c.count("conv_kernel_size", "sconv_kernel_size")
    attention(t, at, heads.query(size), heads.kv(size), hidden)
    t.linear(f"{at}.r_proj", heads.query(c.count("d_rel")), hidden, role="attn_head")
    for name in "kv":
        t.tensor(f"{at}.{name}_sconv.conv1d.weight", heads.kv(size), 1, kernel, role="attn_head")
    norms(t, at, ("q_norm", "k_norm"), size)
    t.tensor(f"{at}.rel_logits_proj.proj", c.count("d_rel"), extent, role="inside")  # one table for all heads


def _experts(t: Table, c: Config, at: str, hidden: int) -> None:
    count, shared = c.count("n_routed_experts", "num_local_experts"), c.number("n_shared_experts")
    t.linear(f"{at}.gate", count + shared, hidden, role="router")
    t.tensor(f"{at}.{CORRECTION}", count, role="router_bias")
    t.tensor(f"{at}.gate.global_scale", 1, role="buffer")
    experts(t, f"{at}.experts", count, expert_channels(c, "moe_intermediate_size"), hidden)
    t.one_of("experts", "stacked experts")
    if shared:
        each = Units("shared_ffn", c.count("moe_intermediate_size"), noun="channels of every shared expert").each()
        t.tensor(f"{at}.shared_experts.gate_proj", shared, each, hidden, role="shared_gate")
        t.tensor(f"{at}.shared_experts.up_proj", shared, each, hidden, role="shared_up")
        t.tensor(f"{at}.shared_experts.down_proj", shared, hidden, each, role="shared_down")


def _kinds(c: Config, layers: int) -> list[str]:
    """Attention in every sixth layer is full, unless ``layer_types`` or the list of local layers says otherwise."""
    if c.get("layer_types") is not None:
        return c.listed("layer_types", layers)
    local = c.get("local_layer_ids", default=[at for at in range(layers) if (at + 1) % 6])
    return ["hybrid_sliding" if at in local else "hybrid" for at in range(layers)]
