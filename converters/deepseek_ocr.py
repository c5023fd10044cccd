"""DeepSeek-OCR 2 and Unlimited-OCR: SAM's encoder, a second encoder on what it makes, and a small model with experts.

The second encoder is Qwen2's layers with queries of its own, or CLIP's with queries, keys and values in one matrix.
Source: transformers ``models/{deepseek_ocr2,unlimited_ocr}/modeling_*.py``; names on disk: ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import MODEL, include_language, language_config
from tpshard.blocks.dense import (
    attention,
    channels_of,
    decoder,
    expert_channels,
    gated_mlp,
    heads_of,
    mlp,
    norms,
)
from tpshard.blocks.experts import mixed_layers, mixture, shared_channels
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "deepseek_ocr"
USUAL = {
    "deepseek_ocr2_text": {"vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008,
                           "num_hidden_layers": 32, "num_attention_heads": 32, "n_routed_experts": 64,
                           "n_shared_experts": 2, "moe_intermediate_size": 1407},
    "unlimited_ocr_text": {"vocab_size": 129_280, "hidden_size": 1280, "intermediate_size": 6848,
                           "num_hidden_layers": 12, "num_attention_heads": 10, "n_routed_experts": 64,
                           "n_shared_experts": 2, "moe_intermediate_size": 896},
}  # fmt: skip
SAM = {"hidden_size": 768, "output_channels": 256, "num_hidden_layers": 12, "num_attention_heads": 12,
       "num_channels": 3, "image_size": 1024, "patch_size": 16, "mlp_ratio": 4.0, "window_size": 14,
       "global_attn_indexes": [2, 5, 8, 11]}  # fmt: skip
QWEN = {"hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32, "num_attention_heads": 32}
CLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 14}  # fmt: skip
MODEL_TYPES = ("deepseek_ocr2", "unlimited_ocr", *USUAL)
ONE_MATRIX = "one small matrix: a cut would need a gather of all that it makes"
CONVOLUTIONS = "convolutions that run once after the encoder"


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return _language(c)
    text, vision = language_config(c, "text_config", model_type=f"{c.model_type}_text"), c.nested("vision_config")
    hidden, t = text.count("hidden_size"), Table(0, prefixes=MODEL)
    include_language(t, text)
    sam = vision.nested("sam_config", **SAM)
    t.include(_sam(sam), "model.sam_model.", "sam_model.", axes="sam_", or_whole=True)
    if c.model_type == "deepseek_ocr2":
        encoder = vision.nested("encoder_config", **QWEN)
        places = "model.qwen2_model.", "qwen2_model."
        t.include(_qwen(encoder), *places, axes="vision_", or_whole=True)
        width = encoder.count("hidden_size")
    else:
        encoder = vision.nested("encoder_config", **CLIP)
        t.include(_clip(encoder), "model.vision_model.", "vision_model.", axes="vision_", or_whole=True)
        channels = Config({"downsample_channels": sam.get("downsample_channels", default=[512, 1024])[-1]})
        width = encoder.count("hidden_size") + channels.count("downsample_channels")
        t.whole("@image_newline", hidden, why="a mark at the end of a row of patches")
    t.whole("@projector.layers.weight", hidden, width, why=ONE_MATRIX)
    t.whole("@projector.layers.bias", hidden, why=ONE_MATRIX)
    t.whole("@view_seperator", hidden, why="a mark between two views")  # spelt so
    return t


def _language(c: Config) -> Table:
    hidden, heads, experts = c.count("hidden_size"), heads_of(c), c.count("n_routed_experts", "num_experts")
    size, layers, layer = c.head_dim(heads.query_heads), mixed_layers(c, first_dense=1), "@layers.{layer}"
    bias = c.flag("attention_bias", default=False)

    t = decoder(c, experts=experts)
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    with t.only(layers.dense):
        gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False))
    with t.only(layers.sparse):
        mixture(
            t, f"{layer}.mlp", experts, expert_channels(c, "moe_intermediate_size"), hidden,
            shared=shared_channels(c.number("n_shared_experts") * c.count("moe_intermediate_size")),
        )  # fmt: skip
    return t


def _sam(c: Config) -> Table:
    hidden, count, patch = c.count("hidden_size"), c.count("num_attention_heads"), c.count("patch_size")
    heads, size, depth = Heads("heads", count, count), hidden // count, c.count("num_hidden_layers")
    places = c.count("image_size") // patch
    width = c.count("mlp_dim", default=int(hidden * c.get("mlp_ratio")))
    ffn, layer = Units("ffn", width, noun="feed-forward channels").each(), "@blocks.{layer}"

    t = Table(depth)
    t.tensor("@patch_embed.proj.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor("@patch_embed.proj.bias", hidden, role="vision_bias")
    t.tensor("@pos_embed", 1, places, places, hidden, role="position")
    t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv", bias=True)
    t.linear(f"{layer}.attn.proj", hidden, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", ffn, hidden, names=("lin1", "lin2"))
    norms(t, layer, ("norm1", "norm2"), hidden, bias=True)
    everywhere = frozenset(c.get("global_attn_indexes"))
    for of, side in ((everywhere, places), (frozenset(range(depth)) - everywhere, c.number("window_size") or places)):
        with t.only(of):
            for axis in "hw":
                t.tensor(f"{layer}.attn.rel_pos_{axis}", 2 * side - 1, size, role="position")
    for part in ("neck", "net_2", "net_3"):
        t.whole_module(f"@{part}", why=CONVOLUTIONS)
    return t


def _qwen(c: Config) -> Table:
    hidden, heads, layer = c.count("hidden_size"), heads_of(c), "@model.model.layers.{layer}"
    size = c.head_dim(heads.query_heads)

    t = Table(c.count("num_hidden_layers"))
    attention(t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden, bias=True)
    gated_mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    t.norm("@model.model.norm", hidden)
    for pixels in (768, 1024):  # a query for every 64 x 64 pixels of an image of that side
        t.embedding(f"@query_{pixels}", (pixels // 64) ** 2, hidden, role="position")
    return t


def _clip(c: Config) -> Table:
    hidden, count, layer = c.count("hidden_size"), c.count("num_attention_heads"), "@transformer.layers.{layer}"
    heads, size = Heads("heads", count, count), hidden // count
    places = (c.count("image_size") // c.count("patch_size")) ** 2 + 1

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@embeddings.class_embedding", hidden, role="vision")
    t.embedding("@embeddings.position_embedding", places, hidden, role="position")
    t.norm("@pre_layrnorm", hidden, bias=True)  # spelt so
    qkv = heads.query(size) + heads.kv(size) * 2
    t.linear(f"{layer}.self_attn.qkv_proj", qkv, hidden, role="qkv", bias=True)
    t.linear(f"{layer}.self_attn.out_proj", hidden, heads.query(size), role="o", bias=True)
    mlp(t, f"{layer}.mlp", channels_of(c), hidden)
    norms(t, layer, ("layer_norm1", "layer_norm2"), hidden, bias=True)
    return t
