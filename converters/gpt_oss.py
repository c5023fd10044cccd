"""gpt-oss: a sink for every head, experts stored input x output, gate and up alternating column by column.

Source: transformers ``models/gpt_oss/modeling_gpt_oss.py`` (``gate_up[..., ::2]``, ``gate_up[..., 1::2]``).
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.config import Config
from tpshard.table import ADDED_ONCE, Table

FAMILY = "gpt_oss"
MODEL_TYPES = ("gpt_oss",)


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads = Heads("heads", query_heads, c.count("num_key_value_heads", default=query_heads))
    size = c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("expert_ffn", c.count("intermediate_size"), noun="channels of every expert")
    vocab = Padded("vocab", c.count("vocab_size")).each()
    experts = c.count("num_local_experts", "num_experts")
    bias = c.flag("attention_bias", default=True)

    t = Table(layers=c.count("num_hidden_layers"), experts=experts, prefixes=("model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q", bias=bias)
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k", bias=bias)
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v", bias=bias)
    t.linear(f"{layer}.self_attn.o_proj", hidden, q, role="o", bias=bias)
    t.tensor(f"{layer}.self_attn.sinks", heads.query(1), role="sinks")
    t.linear(f"{layer}.mlp.router", experts, hidden, role="router", bias=True)
    bank = f"{layer}.mlp.experts"
    t.tensor(f"{bank}.gate_up_proj", experts, hidden, ffn.each(2), role="expert_gate_up")
    t.tensor(f"{bank}.gate_up_proj_bias", experts, ffn.each(2), role="expert_gate_up_bias")
    t.tensor(f"{bank}.down_proj", experts, ffn.each(), hidden, role="expert_down")
    t.tensor(f"{bank}.down_proj_bias", experts, hidden, role="expert_down_bias", note=ADDED_ONCE)
    t.norm(f"{layer}.input_layernorm", hidden)
    t.norm(f"{layer}.post_attention_layernorm", hidden)
    t.norm("@norm", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    return t
