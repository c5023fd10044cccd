"""DiffLlama: Llama in which the heads of the second half are subtracted from those of the first, one by one.

A head ``i`` and its partner ``i + heads / 2`` give one output of twice the width, and each needs the values of
both; so the unit is the pair, and the pairs of KV heads ``(j, j + kv_heads / 2)`` are its groups.
Source: transformers ``models/diffllama/modeling_diffllama.py``; arXiv 2410.05258.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, norms
from tpshard.config import Config
from tpshard.errors import UnsupportedError
from tpshard.table import Table

FAMILY = "diffllama"
MODEL_TYPES = ("diffllama",)


def table(c: Config) -> Table:
    hidden, single = c.count("hidden_size"), heads_of(c)
    size, bias = c.head_dim(single.query_heads), c.flag("attention_bias", default=False)
    if single.kv_heads % 2:
        raise UnsupportedError(
            f"{single.kv_heads} KV heads cannot be halved, as DiffLlama's attention does; correct "
            "'num_key_value_heads' in config.json"
        )
    heads = Heads(
        "heads",
        single.query_heads // 2,
        single.kv_heads // 2,
        noun="pairs of query heads",
        group_noun="pairs of kv heads",
    )

    t = decoder(c)
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size) * 2, heads.kv(size) * 2, hidden, o=heads.query(2 * size),
        bias=bias, out_bias=bias,
    )  # fmt: skip
    for vector in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        t.whole(f"{layer}.self_attn.{vector}", size, why="one vector for all heads")
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
