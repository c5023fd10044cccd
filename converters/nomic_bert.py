"""NomicBERT, GTE and Jina's embeddings v3: BERT with rotary positions, and q, k, v as three blocks of one matrix.

Nomic and GTE have a gate in the feed-forward, GTE in one matrix with what it gates; Jina has none.
Source: transformers ``models/{nomic_bert,gte,jina_embeddings_v3}/`` and ``conversion_mapping.py`` for names on disk.
"""

from __future__ import annotations

from tpshard.blocks.dense import gated_mlp, mlp, vocabulary_of
from tpshard.blocks.encoders import Encoder, embeddings, encoder_of, layer_norms, masked_head, pooler, task_heads
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "nomic_bert"
MODEL_TYPES = ("gte", "jina_embeddings_v3", "nomic_bert")
_PREFIXES = {
    "gte": ("gte.", "new.", ""),
    "jina_embeddings_v3": ("roberta.", ""),
    "nomic_bert": ("nomic_bert.", "bert.", ""),
}


def table(c: Config) -> Table:
    kind, vocab = c.model_type, vocabulary_of(c)
    e = encoder_of(c, vocab)

    t = Table(c.count("num_hidden_layers"), prefixes=_PREFIXES[kind])
    {"gte": _gte, "jina_embeddings_v3": _jina, "nomic_bert": _nomic}[kind](t, c, e)
    pooler(t, e.hidden)
    task_heads(t, e.hidden)
    return t


def _gte(t: Table, c: Config, e: Encoder) -> None:
    embeddings(t, c.with_usual(type_vocab_size=1), e.vocab, e.hidden, positions=False)
    layer = "@encoder.layer.{layer}"
    t.linear(f"{layer}.attention.qkv_proj", e.q + e.kv * 2, e.hidden, role="qkv", bias=True)
    t.linear(f"{layer}.attention.o_proj", e.hidden, e.q, role="o", bias=True)
    t.linear(f"{layer}.mlp.up_gate_proj", e.ffn * 2, e.hidden, role="gate_up")
    t.linear(f"{layer}.mlp.down_proj", e.hidden, e.ffn, role="down", bias=True)
    layer_norms(t, [f"{layer}.attn_ln", f"{layer}.mlp_ln"], e.hidden)
    words = "@embeddings.word_embeddings.weight" if c.flag("tie_word_embeddings", default=True) else None
    masked_head(t, e.hidden, e.hidden, e.vocab, at="lm_head", dense="dense", norm="norm", tied_to=words)


def _jina(t: Table, c: Config, e: Encoder) -> None:
    embeddings(t, c.with_usual(type_vocab_size=1), e.vocab, e.hidden, positions=False, norm=None)
    layer = "@encoder.layers.{layer}"
    t.linear(f"{layer}.mixer.Wqkv", e.q + e.kv * 2, e.hidden, role="qkv", bias=True)
    t.linear(f"{layer}.mixer.out_proj", e.hidden, e.q, role="o", bias=True)
    mlp(t, f"{layer}.mlp", e.ffn, e.hidden)
    layer_norms(t, ["@emb_ln", f"{layer}.norm1", f"{layer}.norm2"], e.hidden)
    words = "@embeddings.word_embeddings.weight" if c.flag("tie_word_embeddings", default=True) else None
    masked_head(t, e.hidden, e.hidden, e.vocab, at="lm_head", dense="dense", norm="layer_norm", tied_to=words)


def _nomic(t: Table, c: Config, e: Encoder) -> None:
    embeddings(t, c, e.vocab, e.hidden, positions=False, norm=None)
    layer = "@encoder.layers.{layer}"
    t.linear(f"{layer}.attn.Wqkv", e.q + e.kv * 2, e.hidden, role="qkv")
    t.linear(f"{layer}.attn.out_proj", e.hidden, e.q, role="o")
    gated_mlp(t, f"{layer}.mlp", e.ffn, e.hidden, names=("fc12", "fc11", "fc2"))
    layer_norms(t, ["@emb_ln", f"{layer}.norm1", f"{layer}.norm2"], e.hidden)
    words = "@embeddings.word_embeddings.weight" if c.flag("tie_word_embeddings", default=True) else None
    masked_head(t, e.hidden, e.hidden, e.vocab, norm="transform.layer_norm", tied_to=words)
