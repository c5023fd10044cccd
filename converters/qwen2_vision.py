"""The vision towers of Qwen2-VL, Qwen2.5-VL and EXAONE 4.5, with the merger that leads to the language model.

q, k, v are three blocks of one matrix, in Qwen2.5-Omni three matrices. Qwen2-VL has LayerNorms and two matrices an
MLP, the others RMS norms and a biased gate; EXAONE 4.5 has fewer KV heads.
Source: transformers ``models/{qwen2_vl,qwen2_5_vl,exaone4_5}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import input_norm, projector
from tpshard.blocks.dense import attention, gated_mlp, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "qwen2_vision"

_USUAL = {"depth": 32, "num_heads": 16, "hidden_size": 3584, "in_channels": 3, "patch_size": 14,
          "temporal_patch_size": 2, "spatial_merge_size": 2}  # fmt: skip
USUAL = {
    "qwen2_vl_vision": {**_USUAL, "embed_dim": 1280, "mlp_ratio": 4},
    "qwen2_5_vl_vision": {**_USUAL, "intermediate_size": 3420, "out_hidden_size": 3584},
    "qwen2_5_omni_vision_encoder": {**_USUAL, "intermediate_size": 3420, "out_hidden_size": 3584},
    "exaone4_5_vision": {**_USUAL, "intermediate_size": 3420, "out_hidden_size": 3584, "num_key_value_heads": 8},
}
MODEL_TYPES = tuple(USUAL)


def table(c: Config) -> Table:
    first = c.model_type == "qwen2_vl_vision"
    width = c.count("embed_dim" if first else "hidden_size")
    out = c.count("hidden_size" if first else "out_hidden_size")
    count = c.count("num_heads", "num_attention_heads")
    heads, size = Heads("heads", count, c.count("num_key_value_heads", default=count)), width // count
    channels = c.count("mlp_ratio") * width if first else c.count("intermediate_size")
    ffn = Units("ffn", channels, noun="feed-forward channels").each()
    patch, merged = c.count("patch_size"), c.count("spatial_merge_size") ** 2 * width

    t = Table(c.count("depth", "num_hidden_layers"))
    t.tensor(
        "@patch_embed.proj.weight", width, c.count("in_channels", "in_chans"), c.count("temporal_patch_size"),
        patch, patch, role="vision",
    )  # fmt: skip
    layer = "@blocks.{layer}"
    if c.model_type == "qwen2_5_omni_vision_encoder":
        attention(t, f"{layer}.attn", heads.query(size), heads.kv(size), width, bias=True, out_bias=True,
                  names=("q", "k", "v", "proj"))  # fmt: skip
    else:
        t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, width, role="qkv", bias=True)
        t.linear(f"{layer}.attn.proj", width, heads.query(size), role="o", bias=True)
    if first:
        mlp(t, f"{layer}.mlp", ffn, width)
    else:
        gated_mlp(t, f"{layer}.mlp", ffn, width, bias=True)
    norms(t, layer, ("norm1", "norm2"), width, bias=first)
    input_norm(t, "@merger.ln_q", width, bias=first)
    projector(t, "@merger", merged, merged, out, names=("mlp.0", "mlp.2"))
    return t
