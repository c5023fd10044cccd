"""StableLM: LayerNorms with biases; the 12B has attention and MLP side by side, and a norm for every head.

Source: transformers ``models/stablelm/modeling_stablelm.py`` (``StableLmLayerNormPerHead``).
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "stablelm"
MODEL_TYPES = ("stablelm",)


def table(c: Config) -> Table:
    hidden, heads = c.count("hidden_size"), heads_of(c)
    size = c.head_dim(heads.query_heads)

    t = decoder(c, norm_bias=True)
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        bias=c.flag("use_qkv_bias", default=False),
    )  # fmt: skip
    if c.flag("qk_layernorm", default=False):
        for norm, count in (("q_layernorm", heads.query_heads), ("k_layernorm", heads.kv_heads)):
            for head in range(count):  # each by its number, so that each is demanded
                name = f"{layer}.self_attn.{norm}.norms.{head}.weight"
                t.whole(name, size, why="a tensor a head, as small as a norm")
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    t.norm(f"{layer}.input_layernorm", hidden, bias=True)
    if not c.flag("use_parallel_residual", default=False):
        t.norm(f"{layer}.post_attention_layernorm", hidden, bias=True)
    return t
