"""MobileBERT: BERT's layers on a narrower stream, between matrices down to it and back, and several feed-forwards.

The ways down and back are cut and gathered. The head's matrix is the embedding beside ``dense``, which is
stored input x output; the model joins them.
Source: transformers ``models/mobilebert/modeling_mobilebert.py``; arXiv 2004.02984.
"""

from __future__ import annotations

from tpshard.axes import Dim, Units
from tpshard.blocks.dense import channels_of, heads_of, mlp, vocabulary_of
from tpshard.blocks.encoders import embeddings, layer_norms, pooler, task_heads
from tpshard.config import Config
from tpshard.table import AFTER_SUM, NEEDS_GATHER, Table

FAMILY = "mobilebert"
MODEL_TYPES = ("mobilebert",)
_LAYER = "@encoder.layer.{layer}"


def table(c: Config) -> Table:
    hidden, width, vocab = c.count("hidden_size"), c.count("embedding_size", default=128), vocabulary_of(c)
    bottleneck = c.flag("use_bottleneck", default=True)
    inner = c.count("intra_bottleneck_size", default=128) if bottleneck else hidden
    heads, ffn = heads_of(c), channels_of(c)
    size = inner // heads.query_heads

    t = Table(c.count("num_hidden_layers"), prefixes=("mobilebert.", ""))
    embeddings(t, c, vocab, width, positions=False, types=False, norm=None)
    positions, types = c.count("max_position_embeddings"), c.count("type_vocab_size", default=2)
    t.embedding("@embeddings.position_embeddings", positions, hidden, role="position")
    t.tensor("@embeddings.position_ids", 1, None, role="buffer", optional=True)  # files before 2023
    t.embedding("@embeddings.token_type_embeddings", types, hidden, role="position")
    layer_norms(t, ["@embeddings.LayerNorm"], hidden)
    taken = 3 * width if c.flag("trigram_input", default=True) else width
    t.linear("@embeddings.embedding_transformation", hidden, taken, role="embed_projection", bias=True)

    narrow = bottleneck and c.flag("use_bottleneck_attention", default=False)
    shared = bottleneck and not narrow and c.flag("key_query_shared_bottleneck", default=True)
    query_from = inner if narrow or shared else hidden
    at = f"{_LAYER}.attention"
    t.linear(f"{at}.self.query", heads.query(size), query_from, role="q", bias=True)
    t.linear(f"{at}.self.key", heads.kv(size), query_from, role="k", bias=True)
    t.linear(f"{at}.self.value", heads.kv(size), inner if narrow else hidden, role="v", bias=True)
    t.linear(f"{at}.output.dense", inner, heads.query(size), role="o", bias=True)
    layer_norms(t, [f"{at}.output.LayerNorm", f"{_LAYER}.output.LayerNorm"], inner)
    mlp(t, _LAYER, ffn, inner, names=("intermediate.dense", "output.dense"))
    for number in range(c.count("num_feedforward_networks", default=4) - 1):
        mlp(t, f"{_LAYER}.ffn.{number}", ffn, inner, names=("intermediate.dense", "output.dense"))
        layer_norms(t, [f"{_LAYER}.ffn.{number}.output.LayerNorm"], inner)
    if bottleneck:
        _bottleneck(t, c, hidden, inner)
    pooler(t, hidden)
    _head(t, c, hidden, width, vocab)
    task_heads(t, hidden)
    return t


def _bottleneck(t: Table, c: Config, hidden: int, inner: int) -> None:
    cut = Units("bottleneck", inner, noun="channels of the narrow stream", or_whole=True).each()
    ways = ("input", "attention") if c.flag("key_query_shared_bottleneck", default=True) else ("input",)
    for way in ways:
        at = f"{_LAYER}.bottleneck.{way}"
        t.linear(f"{at}.dense", cut, hidden, role="gathered", bias=True, note=NEEDS_GATHER)
        layer_norms(t, [f"{at}.LayerNorm"], inner, note=AFTER_SUM)
    back = Units("bottleneck_out", hidden, noun="channels of the wide stream", or_whole=True).each()
    t.linear(f"{_LAYER}.output.bottleneck.dense", back, inner, role="gathered", bias=True, note=NEEDS_GATHER)
    layer_norms(t, [f"{_LAYER}.output.bottleneck.LayerNorm"], hidden)


def _head(t: Table, c: Config, hidden: int, width: int, vocab: Dim) -> None:
    at = "cls.predictions"
    with t.stack(optional=True):
        t.linear(f"{at}.transform.dense", hidden, hidden, role="head_projection", bias=True)
        layer_norms(t, [f"{at}.transform.LayerNorm"], hidden)
        if hidden != width:
            t.tensor(f"{at}.dense.weight", hidden - width, vocab, role="head")
        t.tensor(f"{at}.decoder.weight", vocab, width, role="head", optional=True)
        t.tensor(f"{at}.decoder.bias", vocab, role="head_bias", optional=True)
        t.tensor(f"{at}.bias", vocab, role="head_bias", optional=True)
    if c.flag("tie_word_embeddings", default=True):
        t.tie(f"{at}.decoder.weight", "@embeddings.word_embeddings.weight")
    t.linear("cls.seq_relationship", 2, hidden, role="pooler", bias=None, optional=True)
