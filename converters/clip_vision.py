"""The vision towers of CLIP and SigLIP, and those built like them: a ViT with ``encoder.layers`` and biases everywhere.

CLIP has a class token and a norm before the layers. SigLIP may pool by attention at the end (``head``), which files
made for language models leave out. Heads and channels are cut, patches and positions whole.
Source: transformers ``models/{clip,siglip,siglip2,idefics2,idefics3,smolvlm,video_llama_3,paddleocr_vl,janus}``,
``models/{altclip,granite_docling,kosmos2,minicpm_ocr,minicpmv4_6,minicpmv4_7}``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import attention, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "clip_vision"

_CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_channels": 3, "image_size": 224, "patch_size": 32}  # fmt: skip
_SIGLIP = {**_CLIP, "patch_size": 16}
_IDEFICS3 = {**_CLIP, "hidden_size": 1152, "num_attention_heads": 16}
USUAL = {
    "clip_vision_model": _CLIP,
    "chinese_clip_vision_model": _CLIP,
    "owlvit_vision_model": {**_CLIP, "image_size": 768},
    "siglip_vision_model": _SIGLIP,
    "siglip2_vision_model": {**_SIGLIP, "num_patches": 256},
    "idefics2_vision": _CLIP,
    "idefics3_vision": _IDEFICS3,
    "smolvlm_vision": _IDEFICS3,
    "video_llama_3_vision": _SIGLIP,
    "paddleocr_vl_vision": {**_CLIP, "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                            "num_attention_heads": 16, "image_size": 384, "patch_size": 14},
    "granite_docling_vision": {**_SIGLIP, "image_size": 512},
    "minicpm_ocr_vision": _SIGLIP,
    "minicpmv4_6_vision": _SIGLIP,
    "minicpmv4_7_vision": _SIGLIP,
    "kosmos_2_vision_model": {**_CLIP, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                              "num_attention_heads": 16, "patch_size": 14},
    "altclip_vision_model": _CLIP,
    "janus_vision_model": {**_CLIP, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                           "image_size": 384, "patch_size": 16, "mlp_ratio": 4.0},
}  # fmt: skip
MODEL_TYPES = tuple(USUAL)
CLASS_TOKEN = ("altclip_vision_model", "chinese_clip_vision_model", "clip_vision_model", "kosmos_2_vision_model",
               "owlvit_vision_model")  # fmt: skip


def table(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", count, count), c.head_dim(count)
    is_clip, is_janus = c.model_type in CLASS_TOKEN, c.model_type == "janus_vision_model"
    width = int(c.get("mlp_ratio", default=4.0) * hidden) if is_janus else c.count("intermediate_size")
    ffn = Units("ffn", width, noun="feed-forward channels").each()

    t = Table(c.count("num_hidden_layers"), prefixes=("vision_model.", ""))
    _embeddings(t, c, hidden)
    if is_clip:
        # CLIP spells it so.
        t.norm(f"@{'pre_layernorm' if c.model_type == 'owlvit_vision_model' else 'pre_layrnorm'}", hidden, bias=True)
    layer = "@encoder.layers.{layer}"
    out = "projection_layer" if is_janus else "out_proj"
    attention(
        t, f"{layer}.self_attn", heads.query(size), heads.kv(size), hidden,
        bias=not is_janus or c.flag("attention_bias", default=True), out_bias=True,
        names=("q_proj", "k_proj", "v_proj", out),
    )  # fmt: skip
    if is_janus and c.flag("use_qk_norm", default=False):
        t.norm(f"{layer}.self_attn.q_norm", heads.query(size), bias=True)
        t.norm(f"{layer}.self_attn.k_norm", heads.kv(size), bias=True)
    mlp(t, f"{layer}.mlp", ffn, hidden)
    norms(t, layer, ("layer_norm1", "layer_norm2"), hidden, bias=True)
    t.norm("@post_layernorm", hidden, bias=True)
    if not is_clip and not is_janus:
        with t.stack(optional=True, prefixes=("vision_model.", "")):
            t.tensor("@head.probe", 1, 1, hidden, role="vision")
            t.tensor("@head.attention.in_proj_weight", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv")
            t.tensor("@head.attention.in_proj_bias", heads.query(size) + heads.kv(size) * 2, role="qkv_bias")
            t.linear("@head.attention.out_proj", hidden, heads.query(size), role="o", bias=True)
            t.norm("@head.layernorm", hidden, bias=True)
            mlp(t, "@head.mlp", ffn, hidden)
    return t


def _embeddings(t: Table, c: Config, hidden: int) -> None:
    channels, patch = c.count("num_channels", default=3), c.count("patch_size")
    biased = c.model_type not in CLASS_TOKEN
    if c.model_type == "siglip2_vision_model":
        t.linear("@embeddings.patch_embedding", hidden, channels * patch * patch, role="vision", bias=True)
        positions = c.count("num_patches")
    else:
        t.tensor("@embeddings.patch_embedding.weight", hidden, channels, patch, patch, role="vision")
        if biased:
            t.tensor("@embeddings.patch_embedding.bias", hidden, role="vision_bias")
        positions = (c.count("image_size", default=patch) // patch) ** 2
    if not biased:
        t.tensor("@embeddings.class_embedding", hidden, role="vision")
        positions += 1
    if c.model_type != "video_llama_3_vision":
        t.embedding("@embeddings.position_embedding", positions, hidden, role="position")
        t.tensor("@embeddings.position_ids", 1, positions, role="buffer", optional=True)  # files before 2024
    if c.model_type == "paddleocr_vl_vision":
        t.tensor("@embeddings.packing_position_embedding.weight", None, hidden, role="position", optional=True)
