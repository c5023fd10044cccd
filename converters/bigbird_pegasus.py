"""BigBird-Pegasus and Pegasus-X: BART for long texts; the encoder's attention is another module's.

BigBird's blocks and Pegasus-X's global tokens change which tokens meet, not which heads: both are cut by head.
Source: transformers ``models/bigbird_pegasus/modeling_bigbird_pegasus.py``, ``models/pegasus_x/modeling_pegasus_x.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, mlp, norms
from tpshard.blocks.encdec import layer_of, side, side_axes, vocabulary
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "bigbird_pegasus"
MODEL_TYPES = ("bigbird_pegasus", "pegasus_x")


def table(c: Config) -> Table:
    width, is_bird = c.count("d_model"), c.model_type == "bigbird_pegasus"
    bias = c.flag("use_bias", default=False) if is_bird else False
    t = Table(0, prefixes=("model.", ""))
    vocabulary(c, t, width)
    for name in ("encoder", "decoder"):
        heads, size, ffn = axes = side_axes(c, name, width)
        with side(c, t, name, c.count(f"{name}_layers")) as layer:
            if name == "encoder" and is_bird:
                at, q, kv = f"{layer}.self_attn", heads.query(size), heads.kv(size)
                attention(
                    t, at, q, kv, width, bias=bias, out_bias=bias,
                    names=("self.query", "self.key", "self.value", "output"),
                )  # fmt: skip
                mlp(t, layer, ffn, width)
                norms(t, layer, ("self_attn_layer_norm", "final_layer_norm"), width, bias=True)
            else:
                layer_of(t, layer, axes, width, cross=width if name == "decoder" else None, bias=bias)
            if is_bird:
                t.embedding(
                    f"@{name}.embed_positions", c.count("max_position_embeddings"), width, role="position"
                )
                t.norm(f"@{name}.layernorm_embedding", width, bias=True)
                continue
            t.norm(f"@{name}.layer_norm", width, bias=True)
            if name == "encoder":
                t.norm(f"{layer}.global_self_attn_layer_norm", width, bias=True)
                tokens = c.count("num_global_tokens", default=32)
                t.whole("@encoder.embed_global.weight", tokens, width, why="a few tokens that are of no vocabulary")
    return t
