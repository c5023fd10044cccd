"""OPT: biases everywhere, learned positions with an offset of two, a narrower embedding in the 350M.

Source: transformers ``models/opt/modeling_opt.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "opt"
MODEL_TYPES = ("opt",)


def table(c: Config) -> Table:
    hidden, query_heads = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", query_heads, query_heads), c.head_dim(query_heads)
    q, kv = heads.query(size), heads.kv(size)
    ffn = Units("ffn", c.count("ffn_dim"), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()
    width = c.count("word_embed_proj_dim", default=hidden)
    bias = c.flag("enable_bias", default=True)
    affine = c.flag("layer_norm_elementwise_affine", default=True)

    t = Table(layers=c.count("num_hidden_layers"), prefixes=("model.decoder.", "decoder.", ""))
    t.embedding("@embed_tokens", vocab, width)
    t.embedding("@embed_positions", c.count("max_position_embeddings") + 2, hidden, role="position")
    if width != hidden:
        t.linear("@project_in", hidden, width, role="embed_projection")
        t.linear("@project_out", width, hidden, role="head_projection")
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q", bias=bias)
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k", bias=bias)
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v", bias=bias)
    t.linear(f"{layer}.self_attn.out_proj", hidden, q, role="o", bias=bias)
    t.linear(f"{layer}.fc1", ffn, hidden, role="up", bias=bias)
    t.linear(f"{layer}.fc2", hidden, ffn, role="down", bias=bias)
    if affine:
        t.norm(f"{layer}.self_attn_layer_norm", hidden, bias=True)
        t.norm(f"{layer}.final_layer_norm", hidden, bias=True)
        if c.flag("do_layer_norm_before", default=True) and not c.flag("_remove_final_layer_norm", default=False):
            t.norm("@final_layer_norm", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, width, tied_to="@embed_tokens.weight" if tied else None)
    return t
