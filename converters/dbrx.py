"""DBRX: one ``[Q; K; V]`` matrix, experts flat in three banks of ``experts * width`` rows, counts in nested configs.

Source: transformers ``models/dbrx/modeling_dbrx.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "dbrx"
MODEL_TYPES = ("dbrx",)


def table(c: Config) -> Table:
    own, mixed = c.nested("attn_config", kv_n_heads=1), c.nested("ffn_config", ffn_hidden_size=3584, moe_num_experts=4)
    hidden, query_heads, vocab = c.count("d_model"), c.count("n_heads"), vocabulary_of(c)
    heads, size = Heads("heads", query_heads, own.count("kv_n_heads")), hidden // query_heads
    count = mixed.count("moe_num_experts")
    channels = Units("expert_ffn", mixed.count("ffn_hidden_size"), noun="channels of every expert").each() * count

    t = Table(c.count("n_layers"), prefixes=("transformer.", ""))
    t.embedding("@wte", vocab, hidden)
    block = "@blocks.{layer}"
    t.linear(f"{block}.norm_attn_norm.attn.Wqkv", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv")
    t.linear(f"{block}.norm_attn_norm.attn.out_proj", hidden, heads.query(size), role="o")
    t.norm(f"{block}.norm_attn_norm.norm_1", hidden)
    t.norm(f"{block}.norm_attn_norm.norm_2", hidden)
    t.linear(f"{block}.ffn.router.layer", count, hidden, role="router")
    t.tensor(f"{block}.ffn.experts.mlp.w1", channels, hidden, role="expert_gate")
    t.tensor(f"{block}.ffn.experts.mlp.v1", channels, hidden, role="expert_up")
    t.tensor(f"{block}.ffn.experts.mlp.w2", channels, hidden, role="expert_down")  # stored input x output
    t.norm("@norm_f", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@wte.weight" if tied else None)
    return t
