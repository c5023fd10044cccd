"""Ling 3 (bailing hybrid): delta attention in five layers of six, gated latent attention in the sixth, experts.

A prediction layer past the last is of the last layer's kind.
Source: transformers ``models/bailing_hybrid/modeling_bailing_hybrid.py``; names on disk: ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import (
    channels_of,
    expert_channels,
    experts,
    gated_mlp,
    latent_attention,
    norms,
    vocabulary_of,
)
from tpshard.blocks.mixers import ATTENTION, RECURRENT, every_nth, kimi_delta_attention, layers_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "bailing_hybrid"
MODEL_TYPES = ("bailing_hybrid",)


def table(c: Config) -> Table:
    c = c.with_usual(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
    hidden, vocab, layers = c.count("hidden_size"), vocabulary_of(c), c.count("num_hidden_layers")
    extra = c.number("num_nextn_predict_layers", "num_mtp_layers", default=1)
    count = c.count("num_experts", "num_local_experts", default=512)
    own = Units("linear_heads", c.count("linear_num_heads", "num_attention_heads"), noun="delta heads")

    t = Table(layers, count, extra, prefixes=("model.", ""))
    t.embedding("@word_embeddings", vocab, hidden)
    layer, at = "@layers.{layer}", "@layers.{layer}.attention"
    usual = every_nth(layers, c.count("layer_group_size", default=6), "full_attention", "linear_attention")
    types = c.with_usual(layer_types=usual).listed("layer_types", layers)
    types += types[-1:] * extra
    with t.only(layers_of(types, *RECURRENT)):
        kimi_delta_attention(
            t, at, own, c.count("linear_head_dim", "head_dim", default=128), hidden, a_log=(own.each(),),
            low_rank=False, kernel=c.count("short_conv_kernel_size", "linear_conv_kernel_dim", default=4), out="dense",
        )  # fmt: skip
    with t.only(layers_of(types, *ATTENTION)):
        heads = latent_attention(c, t, at, bias=c.flag("attention_bias", default=False), out="dense")
        t.linear(f"{at}.g_proj", heads.each(), hidden, role="attn_gate")
    kinds = c.get("mlp_layer_types")
    first = c.number("first_k_dense_replace", default=2)
    dense = layers_of(kinds, "dense") if kinds else frozenset(range(min(first, layers)))
    with t.only(dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    with t.only(set(range(layers + extra)) - dense):
        _experts(t, c, f"{layer}.mlp", hidden, count)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.block("prediction"):
        norms(t, layer, ("enorm", "hnorm", "final_layernorm"), hidden)
        t.linear(f"{layer}.eh_proj", hidden, 2 * hidden, role="prediction_projection")
    t.norm("@norm", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@word_embeddings.weight" if tied else None)
    return t


def _experts(t: Table, c: Config, at: str, hidden: int, count: int) -> None:
    number = c.count("num_shared_experts", "n_shared_experts", default=1)
    width = number * c.count("moe_intermediate_size")
    t.linear(f"{at}.gate", count, hidden, role="router")
    t.tensor(f"{at}.gate.expert_bias", count, role="router_bias")
    shared = Units("shared_ffn", width, noun="channels of the shared experts").each()
    gated_mlp(t, f"{at}.shared_experts", shared, hidden, part="shared_")
    experts(t, f"{at}.experts", count, expert_channels(c, "moe_intermediate_size"), hidden)
    t.one_of("experts", "stacked experts")
