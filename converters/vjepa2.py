"""V-JEPA 2: a ViT over patches of video, and a smaller one that predicts what it gives for hidden patches.

Source: transformers ``models/vjepa2/modeling_vjepa2.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import attention, mlp, norms
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "vjepa2"
MODEL_TYPES = ("vjepa2",)


def table(c: Config) -> Table:
    hidden, patch, own = c.count("hidden_size"), c.count("patch_size"), c.count("pred_hidden_size", default=384)
    tubelet, channels = c.count("tubelet_size", default=2), c.count("in_chans", default=3)

    t = Table(c.count("num_hidden_layers"))
    t.tensor("encoder.embeddings.patch_embeddings.proj.weight", hidden, channels, tubelet, patch, patch, role="vision")
    t.tensor("encoder.embeddings.patch_embeddings.proj.bias", hidden, role="vision_bias")
    _layer(t, c, "encoder", hidden, c.count("num_attention_heads"), c.get("mlp_ratio", default=4.0), or_whole=False)
    t.norm("encoder.layernorm", hidden, bias=True)
    with t.stack(c.count("pred_num_hidden_layers", default=12), optional=True):
        masks, count = c.count("pred_num_mask_tokens", default=10), c.count("pred_num_attention_heads", default=12)
        t.tensor("predictor.embeddings.mask_tokens", masks, 1, 1, own, role="vision")
        t.linear("predictor.embeddings.predictor_embeddings", own, hidden, role="embed_projection", bias=True)
        _layer(t, c, "predictor", own, count, c.get("pred_mlp_ratio", default=4.0), or_whole=True)
        t.norm("predictor.layernorm", own, bias=True)
        t.linear("predictor.proj", hidden, own, role="head_projection", bias=True)
    return t


def _layer(t: Table, c: Config, at: str, hidden: int, count: int, ratio: float, *, or_whole: bool) -> None:
    heads, size = Heads(f"{at}_heads", count, count, or_whole=or_whole), hidden // count
    ffn = Units(f"{at}_ffn", int(hidden * ratio), noun="feed-forward channels", or_whole=or_whole).each()
    layer = f"{at}.layer.{{layer}}"
    attention(
        t, f"{layer}.attention", heads.query(size), heads.kv(size), hidden,
        bias=c.flag("qkv_bias", default=True), out_bias=True, names=("query", "key", "value", "proj"),
    )  # fmt: skip
    mlp(t, f"{layer}.mlp", ffn, hidden)
    norms(t, layer, ("norm1", "norm2"), hidden, bias=True)
