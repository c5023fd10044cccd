"""Gemma 4's assistants: small models that propose tokens from a larger one's last vectors, with its keys and values.

What goes in and out has the larger model's width. A head of ordered embeddings first chooses clusters of tokens.
Source: transformers ``models/gemma4{,_unified}_assistant/modeling_gemma4*_assistant.py``.
"""

from __future__ import annotations

from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "gemma4_assistant"
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def table(c: Config) -> Table:
    unified = c.model_type == "gemma4_unified_assistant"
    text = part_of(c, "text_config", model_type="gemma4_unified_text" if unified else "gemma4_text")
    sharing = text.number("num_kv_shared_layers") or text.count("num_hidden_layers")
    text = Config({**text.values, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": sharing})
    hidden, outside = text.count("hidden_size"), c.count("backbone_hidden_size", default=3840 if unified else 1536)

    t = Table(0)
    t.include(table_of(text), "model.")
    t.linear("pre_projection", hidden, 2 * outside, role="embed_projection")
    t.linear("post_projection", outside, hidden, role="head_projection")
    if c.flag("use_ordered_embeddings", default=False):
        centroids = c.count("num_centroids", default=2048)
        t.whole("masked_embedding.centroids.weight", centroids, hidden, why="every rank chooses the same clusters")
        t.tensor("masked_embedding.token_ordering", text.count("vocab_size"), role="buffer")
    return t
