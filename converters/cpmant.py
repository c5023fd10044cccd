"""CPM-Ant: Llama-like attention and gated MLP, position biases shared by all layers, prompts beside the words.

The embedding has rows for the words and for every place of every prompt; the head has those of the words alone
and is stored by itself.
Source: transformers ``models/cpmant/modeling_cpmant.py``.
"""

from __future__ import annotations

from tpshard.axes import Padded, Units
from tpshard.blocks.dense import attention, gated_mlp, heads_of, vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "cpmant"
MODEL_TYPES = ("cpmant",)


def table(c: Config) -> Table:
    hidden, heads, size = c.count("hidden_size"), heads_of(c), c.count("dim_head", default=128)
    ffn = Units("ffn", c.count("dim_ff"), noun="feed-forward channels").each()
    prompts = c.count("prompt_types", default=32) * c.count("prompt_length", default=32)
    rows = Padded("embedding rows", c.count("vocab_size") + prompts, noun="rows of words and prompts").each()
    segments = c.count("segment_types", default=32)
    distances = segments**2 + c.count("position_bias_num_buckets", default=512)

    t = Table(c.count("num_hidden_layers"), prefixes=("cpmant.", ""))
    t.embedding("@input_embedding", rows, hidden)
    t.whole("@segment_embedding.weight", segments, hidden, why="a vector for each segment")
    t.tensor("@position_bias.relative_attention_bias", distances, heads.query(1), role="attn_head")
    layer = "@encoder.layers.{layer}"
    attention(
        t, f"{layer}.self_att.self_attention", heads.query(size), heads.kv(size), hidden,
        names=("project_q", "project_k", "project_v", "attention_out"),
    )  # fmt: skip
    gated_mlp(t, f"{layer}.ffn.ffn", ffn, hidden, names=("w_in.w_0", "w_in.w_1", "w_out"))
    t.norm(f"{layer}.self_att.layernorm_before_attention", hidden)
    t.norm(f"{layer}.ffn.layernorm_before_ffn", hidden)
    t.norm("@encoder.output_layernorm", hidden)
    t.head("lm_head", vocabulary_of(c), hidden, tied_to=None)
    return t
