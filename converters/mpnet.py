"""MPNet: BERT's layers with position biases that all layers share, no token types, RoBERTa's head.

Source: transformers ``models/mpnet/modeling_mpnet.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, heads_of, mlp, vocabulary_of
from tpshard.blocks.encoders import embeddings, encoder_of, layer_norms, pooler, roberta_head, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "mpnet"
MODEL_TYPES = ("mpnet",)


def table(c: Config) -> Table:
    vocab = vocabulary_of(c)
    e = encoder_of(c, vocab)
    buckets = c.count("relative_attention_num_buckets", default=32)

    t = Table(c.count("num_hidden_layers"), prefixes=("mpnet.", ""))
    embeddings(t, c, vocab, e.hidden, types=False, behind_padding=True)
    t.tensor("@encoder.relative_attention_bias.weight", buckets, heads_of(c).query(1), role="attn_head")
    layer = "@encoder.layer.{layer}"
    names = ("q", "k", "v", "o")
    attention(t, f"{layer}.attention.attn", e.q, e.kv, e.hidden, bias=True, out_bias=True, names=names)
    mlp(t, layer, e.ffn, e.hidden, names=("intermediate.dense", "output.dense"))
    layer_norms(t, [f"{layer}.attention.LayerNorm", f"{layer}.output.LayerNorm"], e.hidden)
    pooler(t, e.hidden)
    roberta_head(t, c, e.hidden, vocab)
    task_heads(t, e.hidden)
    return t
