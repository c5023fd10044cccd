"""Qwen2-MoE and Qwen3-MoE: dense and expert layers mixed, experts apart or stacked.

Which layers are dense (``mlp_only_layers``, ``decoder_sparse_step``) the file itself says: every layer
holds the dense block, or a router and experts.
Source: transformers ``models/qwen{2,3}_moe/modeling_qwen*_moe.py``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.partition import Heads, Padded, Units
from tpshard.table import Table

FAMILY = "qwen_moe"
MODEL_TYPES = ("qwen2_moe", "qwen3_moe")


def table(c: Config) -> Table:
    second = c.model_type == "qwen2_moe"
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads = Heads("heads", query_heads, c.count("num_key_value_heads", default=query_heads))
    size = c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    own = Units("expert_ffn", c.count("moe_intermediate_size"), noun="channels of every expert").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    experts = c.count("num_experts", "num_local_experts")
    bias = c.flag("attention_bias", default=False)
    qkv_bias = c.flag("qkv_bias", default=True) if second else bias

    t = Table(layers=c.count("num_hidden_layers"), experts=experts, prefixes=("model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q", bias=qkv_bias)
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k", bias=qkv_bias)
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v", bias=qkv_bias)
    t.linear(f"{layer}.self_attn.o_proj", hidden, q, role="o", bias=bias)
    if not second:
        t.norm(f"{layer}.self_attn.q_norm", size)
        t.norm(f"{layer}.self_attn.k_norm", size)
    with t.block("dense"):
        t.linear(f"{layer}.mlp.gate_proj", ffn, hidden, role="gate")
        t.linear(f"{layer}.mlp.up_proj", ffn, hidden, role="up")
        t.linear(f"{layer}.mlp.down_proj", hidden, ffn, role="down")
    with t.block("router"):
        t.linear(f"{layer}.mlp.gate", experts, hidden, role="router")
        if second:
            width = c.count("shared_expert_intermediate_size")
            shared = Units("shared_ffn", width, noun="channels of the shared expert").each()
            t.linear(f"{layer}.mlp.shared_expert.gate_proj", shared, hidden, role="shared_gate")
            t.linear(f"{layer}.mlp.shared_expert.up_proj", shared, hidden, role="shared_up")
            t.linear(f"{layer}.mlp.shared_expert.down_proj", hidden, shared, role="shared_down")
            t.linear(f"{layer}.mlp.shared_expert_gate", 1, hidden, role="shared_router")
    with t.block("experts"):
        expert = f"{layer}.mlp.experts.{{expert}}"
        t.linear(f"{expert}.gate_proj", own, hidden, role="expert_gate")
        t.linear(f"{expert}.up_proj", own, hidden, role="expert_up")
        t.linear(f"{expert}.down_proj", hidden, own, role="expert_down")
    with t.block("stacked experts"):
        t.tensor(f"{layer}.mlp.experts.gate_up_proj", experts, own * 2, hidden, role="expert_gate_up")
        t.tensor(f"{layer}.mlp.experts.down_proj", experts, hidden, own, role="expert_down")
    t.one_of("dense", "router")
    t.one_of("dense", "experts", "stacked experts")
    t.norm(f"{layer}.input_layernorm", hidden)
    t.norm(f"{layer}.post_attention_layernorm", hidden)
    t.norm("@norm", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    return t
