"""LongCat-Flash: every layer holds two latent attentions and two MLPs, and experts beside them.

``zero_expert_num`` further experts are identities: the router chooses them too. Files that transformers saves hold
unused gate and up matrices of those, the published ones none.
Source: transformers ``models/longcat_flash/modeling_longcat_flash.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import channels_of, decoder, expert_channels, gated_mlp, latent_attention, norms
from tpshard.config import Config
from tpshard.table import PASSES_ON, UNUSED, Table

FAMILY = "longcat_flash"
MODEL_TYPES = ("longcat_flash",)


def table(c: Config) -> Table:
    c = Config({**c.values, "num_hidden_layers": c.count("num_layers")})
    hidden, count = c.count("hidden_size"), c.count("n_routed_experts", "num_local_experts")
    zero, bias = c.number("zero_expert_num", default=256), c.flag("attention_bias", default=False)
    ffn = channels_of(c, "ffn_hidden_size", "intermediate_size")

    t = decoder(c, experts=count, idle_experts=zero)
    layer = "@layers.{layer}"
    for half in (0, 1):
        latent_attention(c, t, f"{layer}.self_attn.{half}", bias=bias)
        gated_mlp(t, f"{layer}.mlps.{half}", ffn, hidden)
        norms(t, layer, (f"input_layernorm.{half}", f"post_attention_layernorm.{half}"), hidden)
    t.linear(f"{layer}.mlp.router.classifier", count + zero, hidden, role="router", bias=None)
    t.tensor(f"{layer}.mlp.router.e_score_correction_bias", count + zero, role="router_bias")
    own, at = expert_channels(c, "expert_ffn_hidden_size", "moe_intermediate_size"), f"{layer}.mlp.experts"
    for name in ("gate", "up"):
        t.linear(f"{at}.{{idle}}.{name}_proj", own, hidden, role=f"expert_{name}", optional=True, note=UNUSED)
        t.linear(f"{at}.{{expert}}.{name}_proj", own, hidden, role=f"expert_{name}")
    t.linear(f"{at}.{{expert}}.down_proj", hidden, own, role="expert_down", note=PASSES_ON if zero else "")
    return t
