"""ModernBERT, encoder and decoder: gated MLPs as ``[input; gate]``, no norm before the first attention.

The encoder has q, k, v as three blocks of one matrix, the decoder three matrices.
Source: transformers ``models/modernbert/modeling_modernbert.py`` and ``models/modernbert_decoder/``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.dense import attention, channels_of, fused_mlp, heads_of, vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "modernbert"
MODEL_TYPES = ("modernbert", "modernbert-decoder")


def table(c: Config) -> Table:
    decoder = c.model_type == "modernbert-decoder"
    hidden, layers, vocab = c.count("hidden_size"), c.count("num_hidden_layers"), vocabulary_of(c)
    heads: Heads = heads_of(c)
    size = c.head_dim(heads.query_heads)
    q, kv = heads.query(size), heads.kv(size)
    bias, norm_bias = c.flag("attention_bias", default=False), c.flag("norm_bias", default=False)

    t = Table(layers, prefixes=("model.", ""))
    t.embedding("@embeddings.tok_embeddings", vocab, hidden)
    t.norm("@embeddings.norm", hidden, bias=norm_bias)
    layer = "@layers.{layer}"
    if decoder:
        names = ("q_proj", "k_proj", "v_proj", "Wo")
        attention(t, f"{layer}.attn", q, kv, hidden, bias=bias, out_bias=bias, names=names)
    else:
        t.linear(f"{layer}.attn.Wqkv", q + kv * 2, hidden, role="qkv", bias=bias)
        t.linear(f"{layer}.attn.Wo", hidden, q, role="o", bias=bias)
    fused_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False), names=("Wi", "Wo"))
    with t.only(range(1, layers)):
        t.norm(f"{layer}.attn_norm", hidden, bias=norm_bias)
    t.norm(f"{layer}.mlp_norm", hidden, bias=norm_bias)
    t.norm("@final_norm", hidden, bias=norm_bias)
    head = "lm_head" if decoder else "head"
    with t.stack(optional=True):
        classifier_bias = c.flag("classifier_bias", default=False)
        t.linear(f"{head}.dense", hidden, hidden, role="head_projection", bias=classifier_bias)
        t.norm(f"{head}.norm", hidden, bias=norm_bias)
        t.tensor("decoder.weight", vocab, hidden, role="head", optional=True)
        t.tensor("decoder.bias", vocab, role="head_bias", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("decoder.weight", "@embeddings.tok_embeddings.weight")
    return t
