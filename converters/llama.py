"""Llama and the many that share its blocks: separate q, k, v, o and gate, up, down.

Source: transformers ``models/llama/modeling_llama.py`` and the modules of the other model types.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.partition import Heads, Padded, Units
from tpshard.table import Table

FAMILY = "llama"
MODEL_TYPES = ("cwm", "granite", "helium", "llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3")


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads = Heads("heads", query_heads, c.count("num_key_value_heads", default=query_heads))
    size = c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    # Where the config demands a bias it must be there; where it says nothing, files converted from elsewhere have some.
    attention_bias = c.flag("attention_bias", default=False) or None
    qkv_bias = c.model_type == "qwen2" or attention_bias
    mlp_bias = c.flag("mlp_bias", default=False) or None

    t = Table(layers=c.count("num_hidden_layers"), prefixes=("model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q", bias=qkv_bias)
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k", bias=qkv_bias)
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v", bias=qkv_bias)
    t.linear(f"{layer}.self_attn.o_proj", hidden, q, role="o", bias=attention_bias)
    if c.model_type == "qwen3":
        t.norm(f"{layer}.self_attn.q_norm", size)
        t.norm(f"{layer}.self_attn.k_norm", size)
    t.tensor(f"{layer}.self_attn.rotary_emb.inv_freq", None, role="buffer", optional=True)  # files of 2023
    t.linear(f"{layer}.mlp.gate_proj", ffn, hidden, role="gate", bias=mlp_bias)
    t.linear(f"{layer}.mlp.up_proj", ffn, hidden, role="up", bias=mlp_bias)
    t.linear(f"{layer}.mlp.down_proj", hidden, ffn, role="down", bias=mlp_bias)
    t.norm(f"{layer}.input_layernorm", hidden)
    t.norm(f"{layer}.post_attention_layernorm", hidden)
    t.norm("@norm", hidden)
    tied = c.flag("tie_word_embeddings", default=c.model_type == "smollm3")
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    return t
