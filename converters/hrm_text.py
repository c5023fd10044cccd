"""HRM-Text: two stacks of layers that are run in turn, with gate, queries, keys and values in one matrix.

Source: transformers ``models/hrm_text/{modeling,configuration}_hrm_text.py``; names on disk: ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Units
from tpshard.blocks.dense import channels_of, fused_mlp, vocabulary_of
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "hrm_text"
MODEL_TYPES = ("hrm_text",)


def table(c: Config) -> Table:
    hidden, vocab, ffn = c.count("hidden_size"), vocabulary_of(c), channels_of(c)
    heads = Units("heads", c.count("num_attention_heads"), noun="attention heads")
    each = heads.each(c.count("head_dim", default=128))
    layers = c.count("num_layers_per_stack", "num_hidden_layers")  # files of the first release have the latter alone

    t = Table(0, prefixes=("model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    t.whole("@z_L_init", hidden, why="where the fast stack starts")
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    for name in ("H_module", "L_module"):
        with t.stack(layers, prefixes=("model.", "")):
            layer = f"@{name}.layers.{{layer}}"
            t.linear(f"{layer}.attn.gqkv_proj", each * 4, hidden, role="qkv_gate")
            t.linear(f"{layer}.attn.o_proj", hidden, each, role="o")
            fused_mlp(t, f"{layer}.mlp", ffn, hidden)
    return t
