"""XLM and FlauBERT: the parts of a layer in lists of their own (``attentions``, ``ffns``, ``layer_norm1``).

Source: transformers ``models/xlm/modeling_xlm.py`` and ``models/flaubert/modeling_flaubert.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import attention, mlp, vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "xlm"
MODEL_TYPES = ("flaubert", "xlm")


def table(c: Config) -> Table:
    hidden, count = c.count("emb_dim", "hidden_size"), c.count("n_heads", "num_attention_heads")
    vocab = vocabulary_of(c)
    heads, size = Heads("heads", count, count), c.with_usual(hidden_size=hidden).head_dim(count)
    ffn = Units("ffn", 4 * hidden, noun="feed-forward channels").each()
    languages = c.count("n_langs", default=1)

    t = Table(c.count("n_layers", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding("@embeddings", vocab, hidden)
    t.embedding("@position_embeddings", c.count("max_position_embeddings", default=512), hidden, role="position")
    t.tensor("@position_ids", 1, None, role="buffer", optional=True)  # files before 2023
    if languages > 1 and c.flag("use_lang_emb", default=True):
        t.whole("@lang_embeddings.weight", languages, hidden, why="a vector for each language")
    attention(
        t, "@attentions.{layer}", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
        names=("q_lin", "k_lin", "v_lin", "out_lin"),
    )  # fmt: skip
    mlp(t, "@ffns.{layer}", ffn, hidden, names=("lin1", "lin2"))
    for norm in ("layer_norm_emb", "layer_norm1.{layer}", "layer_norm2.{layer}"):
        t.norm(f"@{norm}", hidden, bias=True)
    with t.stack(optional=True):
        t.tensor("pred_layer.proj.bias", vocab, role="head_bias")
        t.tensor("pred_layer.proj.weight", vocab, hidden, role="head", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie("pred_layer.proj.weight", "@embeddings.weight")
    return t
