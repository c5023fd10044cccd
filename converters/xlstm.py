"""xLSTM-7B: matrix memories head by head with a norm on each head, and a gated MLP.

The matrices lie apart or, with ``weight_mode: fused``, ``[q; k; v; output gate]`` and ``[gate; up]`` in one.
Source: transformers ``models/xlstm/modeling_xlstm.py``; fused order: NX-AI/xlstm ``xlstm_large/model.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "xlstm"
MODEL_TYPES = ("xlstm",)


def table(c: Config) -> Table:
    hidden, vocab = c.count("hidden_size", "embedding_dim"), vocabulary_of(c)
    heads = Units("linear_heads", c.count("num_heads", default=8), noun="heads")
    qk = heads.each(int(hidden * c.get("qk_dim_factor", default=0.5)) // heads.count)
    v = heads.each(int(hidden * c.get("v_dim_factor", default=1.0)) // heads.count)
    one, bias = heads.each(), c.flag("use_bias", default=False)
    multiple = c.count("ffn_round_up_to_multiple_of", default=64)
    width = int((hidden * c.get("ffn_proj_factor", default=2.667) + multiple - 1) // multiple) * multiple
    ffn = Units("ffn", width, noun="feed-forward channels").each()

    t = Table(c.count("num_hidden_layers", "num_blocks"), prefixes=("backbone.", ""))
    t.embedding("@embeddings", vocab, hidden)
    layer = "@blocks.{layer}"
    at, mlp = f"{layer}.mlstm_layer", f"{layer}.ffn"
    if c.get("weight_mode", default="single") == "fused":
        t.linear(f"{at}.qkv_opreact", qk + qk + v + v, hidden, role="linear_in", bias=bias)
        t.linear(f"{at}.ifgate_preact", one + one, hidden, role="linear_in", bias=True)
        t.linear(f"{mlp}.proj_up_gate_z", ffn * 2, hidden, role="gate_up", bias=bias)
    else:
        for name, rows in (("q", qk), ("k", qk), ("v", v), ("ogate_preact", v)):
            t.linear(f"{at}.{name}", rows, hidden, role="linear_in", bias=bias)
        for name in ("igate_preact", "fgate_preact"):
            t.linear(f"{at}.{name}", one, hidden, role="linear_in", bias=True)
        t.linear(f"{mlp}.proj_up_gate", ffn, hidden, role="gate", bias=bias)
        t.linear(f"{mlp}.proj_up", ffn, hidden, role="up", bias=bias)
    t.tensor(f"{at}.multihead_norm.weight", v, role="linear_head")
    if bias:
        t.tensor(f"{at}.multihead_norm.bias", v, role="linear_head_bias")
    t.linear(f"{at}.out_proj", hidden, v, role="linear_out", bias=bias)
    t.linear(f"{mlp}.proj_down", hidden, ffn, role="down", bias=bias)
    for name in ("norm_mlstm", "norm_ffn"):
        t.norm(f"{layer}.{name}", hidden, bias=bias)
    if c.flag("add_out_norm", default=True):
        t.norm("@out_norm", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embeddings.weight" if tied else None)
    return t
