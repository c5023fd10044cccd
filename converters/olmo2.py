"""OLMo 2 and 3: q and k are normalised over all heads at once, so these norms are cut like q and k.

Source: transformers ``models/olmo2/modeling_olmo2.py``, ``models/olmo3/modeling_olmo3.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "olmo2"
MODEL_TYPES = ("olmo2", "olmo3")


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads = Heads("heads", query_heads, c.count("num_key_value_heads", default=query_heads))
    size = c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("ffn", c.count("intermediate_size"), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    bias = c.flag("attention_bias", default=False)

    t = Table(layers=c.count("num_hidden_layers"), prefixes=("model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q", bias=bias)
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k", bias=bias)
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v", bias=bias)
    t.linear(f"{layer}.self_attn.o_proj", hidden, q, role="o", bias=bias)
    t.norm(f"{layer}.self_attn.q_norm", q)
    t.norm(f"{layer}.self_attn.k_norm", kv)
    t.linear(f"{layer}.mlp.gate_proj", ffn, hidden, role="gate")
    t.linear(f"{layer}.mlp.up_proj", ffn, hidden, role="up")
    t.linear(f"{layer}.mlp.down_proj", hidden, ffn, role="down")
    t.norm(f"{layer}.post_attention_layernorm", hidden)
    t.norm(f"{layer}.post_feedforward_layernorm", hidden)
    t.norm("@norm", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    return t
