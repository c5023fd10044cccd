"""MiniMax-Text-01: lightning attention in most layers, softmax attention in the others, Mixtral's experts in all.

Lightning attention stores q, k, v head by head in one matrix; its norm spans all heads. The decay factors of its
heads are buffers, which some files store.
Source: transformers ``models/minimax/modeling_minimax.py`` (``MiniMaxLightningAttention``).
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import MIXTRAL, attention, channels_of, decoder, experts, heads_of, norms
from tpshard.blocks.mixers import ATTENTION, RECURRENT, every_nth, layers_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "minimax"
MODEL_TYPES = ("minimax",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c, default_kv=8)
    size, count = c.head_dim(heads.query_heads), c.count("num_local_experts", "num_experts", default=8)

    t = decoder(c, experts=count)
    layer, at = "@layers.{layer}", "@layers.{layer}.self_attn"
    usual = every_nth(t.layers, 2, "linear_attention", "full_attention")
    types = c.with_usual(layer_types=usual).listed("layer_types", t.layers)
    with t.only(layers_of(types, *ATTENTION)):
        attention(t, at, heads.query(size), heads.kv(size), hidden)
    with t.only(layers_of(types, *RECURRENT)):
        own = Units("linear_heads", heads.query_heads, noun="lightning heads")
        block = c.count("block_size", default=256)
        t.linear(f"{at}.qkv_proj", own.each(3 * size), hidden, role="linear_in")
        t.linear(f"{at}.output_gate", own.each(size), hidden, role="linear_in")
        t.norm(f"{at}.norm", own.each(size))
        t.linear(f"{at}.out_proj", hidden, own.each(size), role="linear_out")
        one = own.each()
        t.tensor(f"{at}.slope_rate", one, 1, 1, role="linear_head", optional=True)
        t.tensor(f"{at}.query_decay", one, block, 1, role="linear_head", optional=True)
        t.tensor(f"{at}.key_decay", one, block, 1, role="linear_head", optional=True)
        t.tensor(f"{at}.diagonal_decay", 1, one, block, block, role="linear_head", optional=True)
    for kind, module in (("experts", "block_sparse_moe"), ("stacked experts", "mlp")):
        with t.block(kind):
            t.linear(f"{layer}.{module}.gate", count, hidden, role="router")
    experts(
        t, f"{layer}.block_sparse_moe.experts", count, channels_of(c), hidden, names=MIXTRAL,
        bank=f"{layer}.mlp.experts",
    )  # fmt: skip
    t.one_of("experts", "stacked experts")
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
