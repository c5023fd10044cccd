"""Llama 4: experts stacked input x output in some layers, dense MLPs in the others, a shared expert beside the routed.

The vision tower is a ViT whose patches an MLP joins; one matrix leads to the language model.
Source: transformers ``models/llama4/modeling_llama4.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector, whole_projector
from tpshard.blocks.dense import attention, channels_of, decoder, expert_channels, gated_mlp, heads_of, mlp, norms
from tpshard.blocks.experts import layers_where, shared_channels
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "llama4"
USUAL = {
    "llama4_text": {"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
                    "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
                    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                    "num_local_experts": 16},
    "llama4_vision_model": {"hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34,
                            "num_attention_heads": 16, "num_channels": 3, "image_size": 448, "patch_size": 14,
                            "vision_output_dim": 7680, "projector_input_dim": 4096, "projector_output_dim": 4096},
}  # fmt: skip
MODEL_TYPES = ("llama4", *USUAL)


def table(c: Config) -> Table:
    return {"llama4": _whole, "llama4_text": _text, "llama4_vision_model": _vision}[c.model_type](c)


def _whole(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="llama4_text")
    tower = part_of(c, "vision_config", model_type="llama4_vision_model")
    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_model")
    into, out = tower.count("vision_output_dim"), text.count("hidden_size")
    whole_projector(t, "@multi_modal_projector.linear_1", into, out, bias=False)
    return t


def _vision(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    heads, size, out = Heads("heads", count, count), hidden // count, c.count("projector_output_dim")

    t = Table(c.count("num_hidden_layers"))
    t.linear("@patch_embedding.linear", hidden, c.count("num_channels") * patch * patch, role="vision")
    t.tensor("@class_embedding", hidden, role="vision")
    t.tensor("@positional_embedding_vlm", (c.count("image_size") // patch) ** 2 + 1, hidden, role="position")
    t.norm("@layernorm_pre", hidden, bias=True)
    layer = "@model.layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden, bias=True)
    t.norm("@layernorm_post", hidden, bias=True)
    projector(t, "@vision_adapter.mlp", c.count("intermediate_size"), out, out, bias=False, names=("fc1", "fc2"))
    return t


def _text(c: Config) -> Table:
    hidden, heads, depth = c.count("hidden_size"), heads_of(c, default_kv=8), c.count("num_hidden_layers")
    size, bias = c.head_dim(heads.query_heads, default=128), c.flag("attention_bias", default=False)
    count, ffn = c.count("num_local_experts", "num_experts"), expert_channels(c, "intermediate_size")
    step = c.count("interleave_moe_layer_step", default=1)
    sparse = c.get("moe_layers", default=range(step - 1, depth, step))
    layers = layers_where(c, [at in sparse for at in range(depth)])

    t = decoder(c, experts=count)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    if layers.dense:
        with t.only(layers.dense):
            gated_mlp(t, f"{layer}.feed_forward", channels_of(c, "intermediate_size_mlp"), hidden)
    with t.only(layers.sparse):
        t.linear(f"{layer}.feed_forward.router", count, hidden, role="router")
        t.tensor(f"{layer}.feed_forward.experts.gate_up_proj", count, hidden, ffn * 2, role="expert_gate_up")
        t.tensor(f"{layer}.feed_forward.experts.down_proj", count, ffn, hidden, role="expert_down")
        if (shared := shared_channels(c.count("intermediate_size"))) is not None:
            gated_mlp(t, f"{layer}.feed_forward.shared_expert", shared, hidden, part="shared_")
    return t
