"""GPT-Neo: q, k, v without biases, all else with; global and local attention have the same tensors.

Source: transformers ``models/gpt_neo/modeling_gpt_neo.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import attention, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "gpt_neo"
MODEL_TYPES = ("gpt_neo",)


def table(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_heads", "num_attention_heads")
    heads, size = Heads("heads", count, count), c.head_dim(count)
    ffn = Units("ffn", c.count("intermediate_size", default=4 * hidden), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(c.count("num_layers", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding("@wte", vocab, hidden)
    t.embedding("@wpe", c.count("max_position_embeddings"), hidden, role="position")
    layer = "@h.{layer}"
    attention(
        t, f"{layer}.attn.attention", heads.query(size), heads.kv(size), hidden, out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )  # fmt: skip
    mlp(t, f"{layer}.mlp", ffn, hidden, names=("c_fc", "c_proj"))
    norms(t, layer, ("ln_1", "ln_2"), hidden, bias=True)
    # The masks, which releases before 2023 saved.
    t.tensor(f"{layer}.attn.attention.bias", 1, 1, None, None, role="buffer", optional=True)
    t.tensor(f"{layer}.attn.attention.masked_bias", role="buffer", optional=True)
    t.norm("@ln_f", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, hidden, tied_to="@wte.weight" if tied else None)
    return t
