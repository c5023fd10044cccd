"""Switch Transformers: T5 with experts in some layers; a token goes to one.

Source: transformers ``models/switch_transformers/modeling_switch_transformers.py``, arXiv 2101.03961.
"""

from __future__ import annotations

from tpshard.axes import Dim
from tpshard.blocks.t5 import MlpRules, t5_stack, vocabulary
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "switch_transformers"
MODEL_TYPES = ("switch_transformers",)


def table(c: Config) -> Table:
    t = Table(0, prefixes=("", "transformer."))
    vocabulary(c, t, c.count("d_model"), tied=True)
    for side, layers in (("encoder", "num_layers"), ("decoder", "num_decoder_layers")):
        count = c.count(layers, default=12)
        sparse = c.number(f"num_sparse_{side}_layers", default=3)
        step = count // sparse if sparse else count  # as the config class works it out
        t5_stack(c, t, side, _mlp(c, _sparse(count, step), count))
    return t


def _sparse(layers: int, step: int) -> frozenset[int]:
    """Layers with experts, as the model counts them."""
    return frozenset(n for n in range(layers if step > 0 else 0) if step == 1 or n % step == 1)


def _mlp(c: Config, sparse: frozenset[int], layers: int) -> MlpRules:
    width, experts = c.count("d_model"), c.count("num_experts", default=8)

    def rules(t: Table, layer: str, ffn: Dim) -> None:
        with t.only(frozenset(range(layers)) - sparse):
            t.linear(f"{layer}.mlp.wi", ffn, width, role="up")
            t.linear(f"{layer}.mlp.wo", width, ffn, role="down")
        with t.only(sparse):
            bias = c.flag("router_bias", default=False)
            t.linear(f"{layer}.mlp.router.classifier", experts, width, role="router", bias=bias)
            for expert in range(experts if sparse else 0):
                at = f"{layer}.mlp.experts.expert_{expert}"
                t.linear(f"{at}.wi", ffn, width, role="expert_up")
                t.linear(f"{at}.wo", width, ffn, role="expert_down")

    return rules
