"""RoBERTa and its descendants: BERT's layers, a head named ``lm_head``; the norms stand in three places.

After the sums as in BERT, before the blocks (XLM-RoBERTa-XL), or before them with other names (PreLayerNorm). X-MOD
adds a pair of small matrices a language to every layer. Longformer has a second q, k and v for the tokens that see
all others.
Source: transformers ``models/{roberta,camembert,data2vec,longformer,xmod}/`` and
``models/{roberta_prelayernorm,xlm_roberta,xlm_roberta_xl}/``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import vocabulary_of
from tpshard.blocks.encoders import (
    Encoder,
    embeddings,
    encoder_layer,
    encoder_of,
    layer_norms,
    pooler,
    roberta_head,
    task_heads,
)
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "roberta"
_PREFIXES = {
    "camembert": "roberta.",
    "data2vec-text": "data2vec_text.",
    "longformer": "longformer.",
    "roberta": "roberta.",
    "roberta-prelayernorm": "roberta_prelayernorm.",
    "xlm-roberta": "roberta.",
    "xlm-roberta-xl": "roberta.",
    "xmod": "roberta.",
}
MODEL_TYPES = tuple(_PREFIXES)
_AFTER = ("attention.output.LayerNorm", "output.LayerNorm")
_NORMS = {  # of a layer
    "roberta-prelayernorm": ("attention.LayerNorm", "intermediate.LayerNorm"),
    "xlm-roberta-xl": ("attention.self_attn_layer_norm", "LayerNorm"),
}
_LAST = {"roberta-prelayernorm": "@LayerNorm", "xlm-roberta-xl": "@encoder.LayerNorm"}


def table(c: Config) -> Table:
    kind, vocab = c.model_type, vocabulary_of(c)
    e = encoder_of(c, vocab)
    prefix = _PREFIXES[kind]

    t = Table(c.count("num_hidden_layers"), prefixes=(prefix, ""))
    norm = None if kind == "xlm-roberta-xl" else "LayerNorm"
    embeddings(t, c, vocab, e.hidden, norm=norm, behind_padding=True)
    encoder_layer(t, e, norms=_NORMS.get(kind, _AFTER), cross=c.flag("add_cross_attention", default=False))
    if kind in _LAST:
        layer_norms(t, [_LAST[kind]], e.hidden)
    if kind == "longformer":
        for name, role, dim in (("query", "q", e.q), ("key", "k", e.kv), ("value", "v", e.kv)):
            t.linear(f"@encoder.layer.{{layer}}.attention.self.{name}_global", dim, e.hidden, role=role, bias=True)
    if kind == "xmod":
        _adapters(t, c, e)
    pooler(t, e.hidden)
    roberta_head(t, c, e.hidden, vocab)
    task_heads(t, e.hidden)
    return t


def _adapters(t: Table, c: Config, e: Encoder) -> None:
    """A pair of matrices for each language, of which a sentence takes one; and the norm before, if there is one."""
    width = e.hidden // c.count("adapter_reduction_factor", default=2)
    narrow = Units("adapter", width, noun="channels of an adapter", or_whole=True).each()
    at = "@encoder.layer.{layer}.output"
    for language in c.get("languages", default=["en_XX"]):
        t.linear(f"{at}.adapter_modules.{language}.dense1", narrow, e.hidden, role="low_in", bias=True)
        t.linear(f"{at}.adapter_modules.{language}.dense2", e.hidden, narrow, role="low_out", bias=True)
    if c.flag("adapter_layer_norm", default=False):
        layer_norms(t, [f"{at}.adapter_layer_norm"], e.hidden)
