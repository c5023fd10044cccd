"""ProphetNet: encoder and decoder with streams that predict several tokens ahead.

The decoder's relative positions are worked out for all heads from whole hidden states, and the streams flatten
tokens and heads together before they look buckets up: that matrix stays whole.
Source: transformers ``models/prophetnet/modeling_prophetnet.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.dense import attention, mlp
from tpshard.blocks.encdec import lacks, side_axes
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "prophetnet"
MODEL_TYPES = ("prophetnet", "xlm-prophetnet")
OUT = ("query_proj", "key_proj", "value_proj", "out_proj")


def table(c: Config) -> Table:
    width, vocab = c.count("hidden_size"), Padded("vocab", c.count("vocab_size")).each()
    t = Table(0, prefixes=("prophetnet.", ""))
    tied = c.flag("tie_word_embeddings", default=True)
    t.shared(
        "@word_embeddings.weight", "@encoder.word_embeddings.weight", "@decoder.word_embeddings.weight",
        heads=("lm_head.weight",) if tied else (), vocab=vocab, width=width,
    )  # fmt: skip
    if not tied:
        t.tensor("lm_head.weight", vocab, width, role="head", optional=True)
    for name in ("encoder", "decoder"):
        with t.stack(c.count(f"num_{name}_layers"), prefixes=("prophetnet.", ""), optional=lacks(c, name)):
            _side(c, t, name, width)
    return t


def _side(c: Config, t: Table, name: str, width: int) -> None:
    heads, size, ffn = side_axes(c, name, width)
    layer = f"@{name}.layers.{{layer}}"
    cross = name == "decoder" and c.flag("add_cross_attention", default=True)
    for at in ("self_attn", "cross_attn")[: 2 if cross else 1]:
        attention(
            t, f"{layer}.{at}", heads.query(size), heads.kv(size), width, bias=True, out_bias=True, names=OUT
        )
        t.norm(f"{layer}.{at}_layer_norm", width, bias=True)
    mlp(t, f"{layer}.feed_forward", ffn, width, names=("intermediate", "output"))
    t.norm(f"{layer}.feed_forward_layer_norm", width, bias=True)
    t.embedding(f"@{name}.position_embeddings", c.count("max_position_embeddings"), width, role="position")
    t.norm(f"@{name}.embeddings_layer_norm", width, bias=True)
    if name == "decoder":
        why = "one vector for every token that is predicted ahead"
        t.whole("@decoder.ngram_embeddings.weight", c.count("ngram", default=2), width, why=why)
        buckets = c.count("num_buckets", default=32) * heads.query_heads
        why = "relative positions of all heads, which the streams take apart in another order"
        t.whole(f"{layer}.self_attn.relative_pos_embeddings.weight", buckets, width, why=why)
        t.whole(f"{layer}.self_attn.relative_pos_embeddings.bias", buckets, why=why)
