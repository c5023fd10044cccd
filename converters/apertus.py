"""Apertus 1 and 1.5: an MLP without a gate whose activation (xIELU) has two learned numbers a layer, norms of q and k.

Apertus 1.5 may have a head that is narrower than its embedding (``output_vocab_size``).
Source: transformers ``models/apertus/modeling_apertus.py``, ``models/apertus1p5/modeling_apertus1p5.py``,
``activations.py`` (``XIELUActivation``).
"""

from __future__ import annotations

from tpshard.axes import Padded
from tpshard.blocks.dense import attention, channels_of, heads_of, mlp, norms, vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "apertus"
MODEL_TYPES = ("apertus", "apertus1p5_text")
USUAL = {
    "apertus1p5_text": {"vocab_size": 266752, "hidden_size": 4096, "intermediate_size": 14336,
                        "num_hidden_layers": 32, "num_attention_heads": 32},
}  # fmt: skip


def table(c: Config) -> Table:
    hidden, heads, vocab = c.count("hidden_size"), heads_of(c), vocabulary_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)

    t = Table(c.count("num_hidden_layers"), prefixes=("model.", "model.language_model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    layer = "@layers.{layer}"
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, f"{layer}.self_attn", ("q_norm", "k_norm"), size)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=False, names=("up_proj", "down_proj"))
    for number in ("alpha_p", "alpha_n"):
        t.tensor(f"{layer}.mlp.act_fn.{number}", 1, role="inside")
    for number in ("beta", "eps"):
        t.tensor(f"{layer}.mlp.act_fn.{number}", role="buffer", optional=True)
    norms(t, layer, ("attention_layernorm", "feedforward_layernorm"), hidden)
    t.norm("@norm", hidden)
    tied_to = "@embed_tokens.weight" if c.flag("tie_word_embeddings", default=False) else None
    if c.get("output_vocab_size") is None:
        t.head("lm_head", vocab, hidden, tied_to=tied_to)
    else:
        t.head("lm_head", Padded("output_vocab", c.count("output_vocab_size")).each(), hidden, tied_to=None)
    return t
