"""Mixtral: experts w1 (gate), w3 (up), w2 (down), each apart or all stacked under transformers 5's names.

Every expert is cut along its own width; the router stays whole.
Source: transformers ``models/mixtral/modeling_mixtral.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.partition import Heads, Padded, Units
from tpshard.table import Table

FAMILY = "mixtral"
MODEL_TYPES = ("mixtral",)


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads = Heads("heads", query_heads, c.count("num_key_value_heads", default=query_heads))
    size = c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("expert_ffn", c.count("intermediate_size"), noun="channels of every expert").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    experts = c.count("num_local_experts", "num_experts")

    t = Table(layers=c.count("num_hidden_layers"), experts=experts, prefixes=("model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q")
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k")
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v")
    t.linear(f"{layer}.self_attn.o_proj", hidden, q, role="o")
    with t.block("experts"):
        t.linear(f"{layer}.block_sparse_moe.gate", experts, hidden, role="router")
        expert = f"{layer}.block_sparse_moe.experts.{{expert}}"
        t.linear(f"{expert}.w1", ffn, hidden, role="expert_gate")
        t.linear(f"{expert}.w3", ffn, hidden, role="expert_up")
        t.linear(f"{expert}.w2", hidden, ffn, role="expert_down")
    with t.block("stacked experts"):
        t.linear(f"{layer}.mlp.gate", experts, hidden, role="router")
        t.tensor(f"{layer}.mlp.experts.gate_up_proj", experts, ffn * 2, hidden, role="expert_gate_up")
        t.tensor(f"{layer}.mlp.experts.down_proj", experts, hidden, ffn, role="expert_down")
    t.one_of("experts", "stacked experts")
    t.norm(f"{layer}.input_layernorm", hidden)
    t.norm(f"{layer}.post_attention_layernorm", hidden)
    t.norm("@norm", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    return t
