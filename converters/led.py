"""LED: BART for long texts; the encoder attends within windows, and through matrices of their own to all tokens.

Source: transformers ``models/led/modeling_led.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, mlp, norms
from tpshard.blocks.encdec import layer_of, side, side_axes, vocabulary
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "led"
MODEL_TYPES = ("led",)
PREFIXES = ("led.", "")


def table(c: Config) -> Table:
    width = c.count("d_model")
    t = Table(0, prefixes=PREFIXES)
    vocabulary(c, t, width)
    for name in ("encoder", "decoder"):
        heads, size, ffn = axes = side_axes(c, name, width)
        with side(c, t, name, c.count(f"{name}_layers"), PREFIXES) as layer:
            if name == "encoder":
                at, q, kv = f"{layer}.self_attn", heads.query(size), heads.kv(size)
                own = "longformer_self_attn"
                names = (f"{own}.query", f"{own}.key", f"{own}.value", "output")
                attention(t, at, q, kv, width, bias=True, out_bias=True, names=names)
                for role, kind, rows in (("q", "query", q), ("k", "key", kv), ("v", "value", kv)):
                    t.linear(f"{at}.{own}.{kind}_global", rows, width, role=role, bias=True)
                mlp(t, layer, ffn, width)
                norms(t, layer, ("self_attn_layer_norm", "final_layer_norm"), width, bias=True)
            else:
                layer_of(t, layer, axes, width, cross=width)
            positions = c.count(f"max_{name}_position_embeddings")
            t.embedding(f"@{name}.embed_positions", positions, width, role="position")
            t.norm(f"@{name}.layernorm_embedding", width, bias=True)
    return t
