"""KOSMOS-2 and 2.5: an image tower, queries that look at what it makes, and a decoder with norms inside its blocks.

The decoder has a norm over all channels of the feed-forward before the second matrix, KOSMOS-2 one over all heads
before the output matrix as well: both need a sum. KOSMOS-2 has CLIP's tower, 2.5 that of Pix2Struct.
Source: transformers ``models/{kosmos2,kosmos2_5}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import include_tower, whole_projector
from tpshard.blocks.dense import attention, channels_of, gated_mlp, mlp, norms, vocabulary_of
from tpshard.blocks.encdec import OUT, attend, head_size
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "kosmos2"
PARTS = {  # the text model's and the tower's model types
    "kosmos-2": ("kosmos_2_text_model", "kosmos_2_vision_model"),
    "kosmos-2.5": ("kosmos_2_5_text_model", "kosmos_2_5_vision_model"),
}
USUAL = {
    "kosmos_2_text_model": {"vocab_size": 65037, "embed_dim": 2048, "layers": 24, "ffn_dim": 8192,
                            "attention_heads": 32},
    "kosmos_2_5_text_model": {"vocab_size": 108481, "embed_dim": 1536, "layers": 24, "ffn_dim": 6144,
                              "attention_heads": 16},
    "kosmos_2_5_vision_model": {"hidden_size": 1536, "patch_embed_hidden_size": 768, "intermediate_size": 3968,
                                "head_dim": 64, "num_hidden_layers": 18, "num_attention_heads": 24,
                                "max_num_patches": 4096},
}  # fmt: skip
MODEL_TYPES = ("kosmos-2", "kosmos-2.5", *USUAL)


def table(c: Config) -> Table:
    if c.model_type not in PARTS:
        return _tower(c) if c.model_type == "kosmos_2_5_vision_model" else _text(c)
    language, vision = PARTS[c.model_type]
    text, tower = part_of(c, "text_config", model_type=language), part_of(c, "vision_config", model_type=vision)
    hidden, heads, at = text.count("embed_dim"), _heads(text), "image_to_text_projection"
    size = head_size(hidden, heads.query_heads)

    t = Table(0)
    t.include(table_of(text), ("text_model.model.", "text_model."))
    include_tower(t, tower, "vision_model.model", "vision_model")
    whole_projector(t, f"{at}.dense", tower.count("hidden_size"), hidden)
    queries = c.count("latent_query_num", default=64 if c.model_type == "kosmos-2" else 2048)
    t.tensor(f"{at}.latent_query", queries, hidden, role="vision")
    attention(
        t, f"{at}.x_attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True, names=OUT
    )
    return t


def _heads(c: Config) -> Heads:
    count = c.count("attention_heads")
    return Heads("heads", count, count)


def _text(c: Config) -> Table:
    hidden, heads, vocab, layer = c.count("embed_dim"), _heads(c), vocabulary_of(c), "@layers.{layer}"
    size, second = head_size(hidden, heads.query_heads), c.model_type == "kosmos_2_text_model"
    ffn = Units("ffn", c.count("ffn_dim"), noun="feed-forward channels").each()

    t = Table(c.count("layers"), prefixes=("model.", ""))
    t.embedding("@embed_tokens", vocab, hidden)
    if not second:
        t.embedding("@segment_emb", 2, hidden, role="position")  # of text or of an image
    attend(t, f"{layer}.self_attn", heads, size, hidden)
    if second:
        t.norm(f"{layer}.self_attn.inner_attn_ln", heads.query(size), bias=True)
        if c.flag("add_cross_attention", default=False):
            attend(t, f"{layer}.encoder_attn", heads, size, hidden)
    mlp(t, f"{layer}.ffn", ffn, hidden)
    t.norm(f"{layer}.ffn.ffn_layernorm", ffn, bias=True)
    t.norm(f"{layer}.final_layer_norm", hidden, bias=True)
    t.norm("@layer_norm", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=True)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if tied else None)
    return t


def _tower(c: Config) -> Table:
    hidden, count, size = c.count("hidden_size"), c.count("num_attention_heads"), c.count("head_dim")
    heads, layer = Heads("heads", count, count), "@encoder.layer.{layer}"

    t = Table(c.count("num_hidden_layers"))
    t.linear("@embeddings.patch_projection", hidden, c.count("patch_embed_hidden_size"), role="vision", bias=True)
    for side in ("row", "column"):
        t.embedding(f"@embeddings.{side}_embedder", c.count("max_num_patches"), hidden, role="position")
    attention(
        t, f"{layer}.attention", heads.query(size), heads.kv(size), hidden, names=("query", "key", "value", "output")
    )
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, names=("wi_0", "wi_1", "wo"))
    norms(t, layer, ("pre_attention_layer_norm", "pre_mlp_layer_norm"), hidden)
    t.norm("@layernorm", hidden)
    return t
