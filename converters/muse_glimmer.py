"""Muse Glimmer: a ViT, an MLP on what it makes and one more matrix, and a decoder whose heads' outputs are gated.

Source: transformers ``models/muse_glimmer/modeling_muse_glimmer.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, projector, whole_projector
from tpshard.blocks.dense import attention, channels_of, decoder, gated_mlp, heads_of, mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "muse_glimmer"
USUAL = {
    "muse_glimmer_text": {"vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19968,
                          "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
                          "head_dim": 128},
    "muse_glimmer_vision": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 50,
                            "num_attention_heads": 16, "patch_size": 14, "patch_temporal": 2, "pos_emb_height": 32,
                            "pos_emb_width": 32},
}  # fmt: skip
MODEL_TYPES = ("muse_glimmer", *USUAL)
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def table(c: Config) -> Table:
    if c.model_type != "muse_glimmer":
        return _text(c) if c.model_type == "muse_glimmer_text" else _tower(c)
    text = language_config(c, "text_config", model_type="muse_glimmer_text")
    tower = part_of(c, "vision_config", model_type="muse_glimmer_vision")
    joined, width = c.count("out_hidden_size", default=6144), c.count("projector_hidden_size", default=4096)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    projector(t, "@vision_adapter", joined, width, width, bias=False, names=("fc1", "fc2"))
    whole_projector(t, "@vision_projection", width, text.count("hidden_size"), bias=False)
    return t


def _text(c: Config) -> Table:
    hidden, heads, size, layer = c.count("hidden_size"), heads_of(c), c.count("head_dim"), "@layers.{layer}"
    bias, q = c.flag("attention_bias", default=False), heads.query(size)

    t = decoder(c)
    attention(t, f"{layer}.self_attn", q, heads.kv(size), hidden, bias=bias, out_bias=bias)
    t.linear(f"{layer}.self_attn.gate_proj", q, hidden, role="attn_gate")
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, NORMS, hidden)
    return t


def _tower(c: Config) -> Table:
    hidden, count, layer = c.count("hidden_size"), c.count("num_attention_heads"), "@layers.{layer}"
    heads, size = Heads("heads", count, count), c.head_dim(count)
    values, places = 3 * c.count("patch_temporal") * c.count("patch_size") ** 2, c.count("pos_emb_height")

    t = Table(c.count("num_hidden_layers"))
    at = "@patch_embedder"
    t.tensor(f"{at}.patch_embedding.weight", hidden, values, role="vision")
    t.embedding(f"{at}.position_embedding_table", places * c.count("pos_emb_width"), hidden, role="position")
    attention(
        t, f"{layer}.attn", heads.query(size), heads.kv(size), hidden, bias=True, out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "proj"),
    )  # fmt: skip
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("norm1", "norm2"), hidden, bias=True)
    for name in ("ln_pre", "ln_post"):
        t.norm(f"@{name}", hidden, bias=True)
    return t
