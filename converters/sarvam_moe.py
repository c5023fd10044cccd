"""Sarvam's mixture: GLM-4.5's model under Bailing's names, with one ``[Q; K; V]`` matrix.

Source: transformers ``models/sarvam_moe/configuration_sarvam_moe.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import channels_of, expert_channels, gated_mlp, heads_of, norms, vocabulary_of
from tpshard.blocks.experts import mixed_layers, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "sarvam_moe"
MODEL_TYPES = ("sarvam_moe",)


def table(c: Config) -> Table:
    hidden, heads, vocab = c.count("hidden_size"), heads_of(c, default_kv=4), vocabulary_of(c)
    size, bias = c.head_dim(heads.query_heads, default=64), c.flag("attention_bias", "use_qkv_bias", default=False)
    count = c.count("num_experts", "n_routed_experts", "num_local_experts")
    width, layers = c.count("moe_intermediate_size"), mixed_layers(c, first_dense=1)

    t = Table(c.count("num_hidden_layers"), experts=count, prefixes=("model.", ""))
    t.embedding("@word_embeddings", vocab, hidden)
    layer = "@layers.{layer}"
    q, kv = heads.query(size), heads.kv(size)
    t.linear(f"{layer}.attention.query_key_value", q + kv * 2, hidden, role="qkv", bias=bias)
    t.linear(f"{layer}.attention.dense", hidden, q, role="o")
    if c.flag("use_qk_norm", default=True):
        norms(t, f"{layer}.attention", ("query_layernorm", "key_layernorm"), size)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", count, expert_channels(c, "moe_intermediate_size"), hidden,
            correction="gate.expert_bias",
            shared=shared_channels(c.number("num_shared_experts", "n_shared_experts", default=1) * width),
        )  # fmt: skip
    t.norm("@norm", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@word_embeddings.weight" if tied else None)
    return t
