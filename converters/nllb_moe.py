"""NLLB-MoE: M2M-100's stacks, with experts in every fourth layer; a token goes to two.

Source: transformers ``models/nllb_moe/modeling_nllb_moe.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import mlp
from tpshard.blocks.encdec import attend, side, side_axes, vocabulary
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "nllb-moe"
MODEL_TYPES = ("nllb-moe",)


def table(c: Config) -> Table:
    width, experts = c.count("d_model"), c.count("num_experts", default=128)
    t = Table(0, prefixes=("model.", ""))
    vocabulary(c, t, width)
    for name in ("encoder", "decoder"):
        heads, size, ffn = side_axes(c, name, width)
        count = c.count(f"{name}_layers")
        step = c.number(f"{name}_sparse_step", default=4)
        sparse = frozenset(n for n in range(count) if step and (n + 1) % step == 0)
        with side(c, t, name, count) as layer:
            for at in ("self_attn", "cross_attention")[: 2 if name == "decoder" else 1]:
                attend(t, f"{layer}.{at}", heads, size, width)
            with t.only(frozenset(range(count)) - sparse):
                mlp(t, f"{layer}.ffn", ffn, width)
            with t.only(sparse):
                bias = c.flag("router_bias", default=False)
                t.linear(f"{layer}.ffn.router.classifier", experts, width, role="router", bias=bias)
                for expert in range(experts if sparse else 0):
                    at = f"{layer}.ffn.experts.expert_{expert}"
                    t.linear(f"{at}.fc1", ffn, width, role="expert_up", bias=True)
                    t.linear(f"{at}.fc2", width, ffn, role="expert_down", bias=True)
            t.norm(f"{layer}.ff_layer_norm", width, bias=True)
            t.norm(f"@{name}.layer_norm", width, bias=True)
            t.tensor(f"@{name}.embed_positions.weights", None, width, role="buffer", optional=True)  # older files
    return t
