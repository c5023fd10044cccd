"""JetMoE: attention has experts too, each with query and output matrices over the KV heads that all share.

A KV head and the heads that the experts put over it are one unit. The biases after the experts are of the module
around them, which adds them to what is summed already.
Source: transformers ``models/jetmoe/modeling_jetmoe.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import decoder, expert_channels, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "jetmoe"
MODEL_TYPES = ("jetmoe",)
AFTER = "added after the sum over ranks, by the module around the experts"


def table(c: Config) -> Table:
    hidden, count, ffn = c.count("hidden_size"), c.count("num_local_experts"), expert_channels(c, "intermediate_size")
    kv_heads = Units("heads", c.count("num_key_value_heads", default=16), noun="kv heads")
    heads = kv_heads.each(c.count("kv_channels", "head_dim", default=128))

    t = decoder(c, tied=True)
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attention.kv_proj", heads * 2, hidden, role="kv")
    own, mlp = f"{layer}.self_attention.experts", f"{layer}.mlp"
    t.tensor(f"{own}.input_linear.weight", count, heads, hidden, role="q")
    t.tensor(f"{own}.output_linear.weight", count, hidden, heads, role="o")
    t.tensor(f"{mlp}.input_linear.weight", count, ffn * 2, hidden, role="expert_gate_up")
    t.tensor(f"{mlp}.output_linear.weight", count, hidden, ffn, role="expert_down")
    for at in (own, mlp):
        t.linear(f"{at}.router.layer", count, hidden, role="router")
        t.whole(f"{at}.bias", hidden, why=AFTER)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    return t
