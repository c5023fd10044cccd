"""OLMo-Hybrid: gated delta nets with separate matrices and convolutions, every fourth layer OLMo 3's attention.

The norms of q and k span all heads. The two kinds of layers have their norms in other places and, on disk, under
other names.
Source: transformers ``models/olmo_hybrid/modeling_olmo_hybrid.py``; names on disk: ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of
from tpshard.blocks.mixers import ATTENTION, RECURRENT, delta_heads, delta_net, every_nth, layers_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "olmo_hybrid"
MODEL_TYPES = ("olmo_hybrid",)


def table(c: Config) -> Table:
    hidden, heads, ffn = c.count("hidden_size"), heads_of(c), channels_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)
    c = c.with_usual(linear_num_key_heads=heads.query_heads, linear_num_value_heads=heads.query_heads)
    c = c.with_usual(linear_key_head_dim=int(0.75 * hidden / c.count("linear_num_key_heads")))
    c = c.with_usual(linear_value_head_dim=2 * c.count("linear_key_head_dim"))
    d = delta_heads(c)

    t = decoder(c)
    layer = "@layers.{layer}"
    types = c.with_usual(layer_types=_usual(t.layers)).listed("layer_types", t.layers)
    linear, attentive = layers_of(types, *RECURRENT), layers_of(types, *ATTENTION)
    parts = {"q": d.key, "k": d.key, "v": d.value}
    with t.only(linear):
        delta_net(
            t, f"{layer}.linear_attn", d, hidden,
            ins={f"{x}_proj": rows for x, rows in {**parts, "g": d.value, "a": d.one, "b": d.one}.items()},
            convolutions={f"{x}_conv1d": rows for x, rows in parts.items()},
            kernel=c.count("linear_conv_kernel_dim", default=4), norm="o_norm", out="o_proj",
        )  # fmt: skip
    with t.only(attentive):
        at = f"{layer}.self_attn"
        q, kv = heads.query(size), heads.kv(size)
        attention(t, at, q, kv, hidden, bias=bias, out_bias=bias)
        t.norm(f"{at}.q_norm", q)
        t.norm(f"{at}.k_norm", kv)
        t.norm(f"{layer}.post_feedforward_layernorm", hidden)
    gated_mlp(t, f"{layer}.mlp", ffn, hidden)
    for block, first, second in (
        ("norms", "attention_layer_norm", "feedforward_layer_norm"),
        ("norms in memory", "input_layernorm", "post_attention_layernorm"),
    ):
        with t.block(block):
            with t.only(linear):
                t.norm(f"{layer}.{first}", hidden)
            t.norm(f"{layer}.{second}", hidden)
    t.one_of("norms", "norms in memory")
    return t


def _usual(layers: int) -> list[str]:
    types = every_nth(layers, 4, "full_attention", "linear_attention")
    return types if "full_attention" in types else [*types[:-1], "full_attention"]
