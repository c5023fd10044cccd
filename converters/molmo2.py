"""Molmo 2: a ViT, attention that pools patches of two of its layers, a gated MLP, and a language model like Qwen3's.

Queries, keys and values are one matrix on disk, as are up and gate. A few tokens for images have an embedding of their
own, and no rows of the head. The layers that the pooling takes are joined before it.
Source: transformers ``models/molmo2/modeling_molmo2.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Padded, Units
from tpshard.blocks.composite import MODEL
from tpshard.blocks.dense import attention, channels_of, fused_mlp, heads_of, mlp, norms, vocabulary_of
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "molmo2"
_ADAPTER = {"hidden_size": 1152, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72,
            "intermediate_size": 18944}  # fmt: skip
USUAL = {
    "molmo2_text": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                    "vocab_size": 151936, "additional_vocab_size": 128, "num_hidden_layers": 36,
                    "intermediate_size": 12288},
    "molmo2_vision": {**_ADAPTER, "intermediate_size": 4304, "num_hidden_layers": 25, "patch_size": 14,
                      "num_channels": 3},
}  # fmt: skip
MODEL_TYPES = ("molmo2", "molmo2_text", "molmo2_vision")
WQKVO = ("wq", "wk", "wv", "wo")


def table(c: Config) -> Table:
    if c.model_type != "molmo2":
        return _text(c) if c.model_type == "molmo2_text" else _tower(c)
    text = part_of(c, "text_config", model_type="molmo2_text")
    vision = c.nested("vision_config", "vit_config").values
    tower = part_of(Config({"part": {**vision, "model_type": "molmo2_vision"}}), "part", model_type="molmo2_vision")

    t = Table(0, prefixes=MODEL)
    t.include(table_of(text), ("model.transformer.", ""), ("transformer.", ""))
    places = tuple((f"{outer}vision_backbone.image_vit.",) * 2 for outer in MODEL)
    t.include(table_of(tower), *places, axes="vision_", or_whole=True)
    _adapter(t, c.nested("adapter_config", **_ADAPTER), text.count("hidden_size"))
    return t


def _text(c: Config) -> Table:
    hidden, heads, size, layer = c.count("hidden_size"), heads_of(c), c.count("head_dim"), "@blocks.{layer}"
    vocab, q, kv = vocabulary_of(c), heads.query(size), heads.kv(size)

    t = Table(c.count("num_hidden_layers"), prefixes=("model.transformer.", "transformer.", ""))
    t.tensor("@wte.embedding", vocab, hidden, role="embed")
    added = Padded("added_vocab", c.count("additional_vocab_size"), noun="added vocabulary rows")
    t.tensor("@wte.new_embedding", added.each(), hidden, role="embed")
    bias = c.flag("attention_bias", "qkv_bias", default=False)
    t.linear(f"{layer}.self_attn.att_proj", q + kv * 2, hidden, role="qkv", bias=bias)
    t.linear(f"{layer}.self_attn.attn_out", hidden, q, role="o")
    whole = c.get("qk_norm_type", default="qwen3") == "qwen3"
    t.norm(f"{layer}.self_attn.q_norm", size if whole else q)
    t.norm(f"{layer}.self_attn.k_norm", size if whole else kv)
    fused_mlp(t, f"{layer}.mlp", channels_of(c), hidden, names=("ff_proj", "ff_out"))
    norms(t, layer, ("attn_norm", "ff_norm"), hidden)
    t.norm("@ln_f", hidden)
    t.head("lm_head", vocab, hidden, tied_to=None)
    return t


def _tower(c: Config) -> Table:
    hidden, heads, size = c.count("hidden_size"), heads_of(c), c.count("head_dim")
    layer, patch = "@transformer.resblocks.{layer}", c.count("patch_size", "image_patch_size")
    sides = c.get("image_size", "image_default_input_size", default=[378, 378])
    height, width = (Config({"image_size": side}).count("image_size") // patch for side in sides)
    places = c.count("num_position_embeddings", "image_num_pos", default=height * width)
    bias = c.flag("attention_bias", default=True)

    t = Table(c.count("num_hidden_layers"))
    t.linear("@patch_embedding", hidden, patch * patch * c.count("num_channels"), role="vision", bias=True)
    t.tensor("@positional_embedding", places, hidden, role="position")
    attention(
        t, f"{layer}.attention", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias, names=WQKVO
    )
    mlp(t, f"{layer}.feed_forward", channels_of(c), hidden, names=("w1", "w2"))
    norms(t, layer, ("attention_norm", "ffn_norm"), hidden, bias=True)
    return t


def _adapter(t: Table, c: Config, out: int) -> None:
    width, size, bias = c.count("hidden_size"), c.count("head_dim"), c.flag("attention_bias", default=True)
    counts = c.count("num_attention_heads"), c.count("num_key_value_heads")
    heads, layers = Heads("pooling_heads", *counts, or_whole=True), c.get("vision_feature_layer", "vit_layers")
    joined, at = width * len(layers or (24, 18)), "@vision_backbone.image_pooling_2d"
    q, kv = heads.query(size), heads.kv(size)
    for name, rows, role in (("wq", q, "q"), ("wk", kv, "k"), ("wv", kv, "v")):
        t.linear(f"{at}.{name}", rows, joined, role=role, bias=bias)
    t.linear(f"{at}.wo", width, q, role="o", bias=bias)
    channels = Units("projector", c.count("intermediate_size"), noun="channels of the projector").each()
    bias, at = c.flag("mlp_bias", default=False), "@vision_backbone.image_projector"
    for name in ("w1", "w3"):
        t.linear(f"{at}.{name}", channels, width, role="projector_in", bias=bias)
    t.linear(f"{at}.w2", out, channels, role="projector_out")
