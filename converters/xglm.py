"""XGLM and BioGPT, decoders in fairseq's form: norms before the blocks, biases on every matrix.

XGLM's positions are sinusoids that the model computes; BioGPT's are learned, with an offset of two.
Source: transformers ``models/xglm/modeling_xglm.py`` and ``models/biogpt/modeling_biogpt.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.dense import attention, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "xglm"
MODEL_TYPES = ("biogpt", "xglm")


def table(c: Config) -> Table:
    biogpt = c.model_type == "biogpt"
    hidden, count = c.count("d_model", "hidden_size"), c.count("attention_heads", "num_attention_heads")
    heads, size = Heads("heads", count, count), c.with_usual(hidden_size=hidden).head_dim(count)
    ffn = Units("ffn", c.count("ffn_dim", "intermediate_size"), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(c.count("num_layers", "num_hidden_layers"), prefixes=("biogpt." if biogpt else "model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    if biogpt:
        t.embedding("@embed_positions", c.count("max_position_embeddings") + 2, hidden, role="position")
    else:
        t.tensor("@embed_positions.weights", None, hidden, role="buffer", optional=True)  # files of 2022
    layer = "@layers.{layer}"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )  # fmt: skip
    mlp(t, layer, ffn, hidden)
    norms(t, layer, ("self_attn_layer_norm", "final_layer_norm"), hidden, bias=True)
    t.norm("@layer_norm", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    head = "output_projection" if biogpt else "lm_head"
    t.head(head, vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    return t
