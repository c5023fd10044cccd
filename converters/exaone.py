"""EXAONE 3: Llama with GPT-2's names (``transformer.h``, ``wte``, ``c_fc_0`` for the gate).

Source: transformers ``conversion_mapping.py`` (``exaone``) and ``models/exaone/configuration_exaone.py``.
"""

from __future__ import annotations

from tpshard.blocks.dense import attention, channels_of, gated_mlp, heads_of, norms, vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "exaone"
MODEL_TYPES = ("exaone",)


def table(c: Config) -> Table:
    hidden, heads, vocab = c.count("hidden_size"), heads_of(c), vocabulary_of(c)
    size, bias = c.head_dim(heads.query_heads), c.flag("attention_bias", default=False)

    t = Table(c.count("num_hidden_layers", "num_layers"), prefixes=("transformer.", ""))
    t.embedding("@wte", vocab, hidden)
    layer = "@h.{layer}"
    attention(
        t, f"{layer}.attn.attention", heads.query(size), heads.kv(size), hidden,
        bias=bias, out_bias=bias, names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )  # fmt: skip
    t.tensor(f"{layer}.attn.attention.rotary.inv_freq", None, role="buffer", optional=True)
    gated_mlp(
        t, f"{layer}.mlp", channels_of(c), hidden,
        bias=c.flag("mlp_bias", default=False), names=("c_fc_0", "c_fc_1", "c_proj"),
    )  # fmt: skip
    norms(t, layer, ("ln_1", "ln_2"), hidden)
    t.norm("@ln_f", hidden)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@wte.weight" if tied else None)
    return t
