"""GOT-OCR 2 and PP-Chart2Table: SAM's tower, whose patches convolutions join, and a Qwen2.

The tower's q, k, v are three blocks of one matrix. Its tables of relative positions are the same for all heads, and
so whole, as are its neck and the convolutions of the projector.
Source: transformers ``models/got_ocr2/modeling_got_ocr2.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads, Units
from tpshard.blocks.composite import MODEL, include_language, include_tower, language_config, whole_projector
from tpshard.blocks.dense import mlp, norms
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "got_ocr2"
_VISION = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "mlp_dim": 3072,
           "output_channels": 256, "num_channels": 3, "image_size": 1024, "patch_size": 16}  # fmt: skip
USUAL = {"got_ocr2_vision": _VISION, "pp_chart2table_vision": _VISION}
MODEL_TYPES = ("got_ocr2", "got_ocr2_vision", "pp_chart2table", "pp_chart2table_vision")
CONVOLUTION = "convolutions over patches, small beside the rest"


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return _tower(c)
    text = language_config(c, "text_config", model_type="qwen2", tied=True)
    tower = part_of(c, "vision_config", model_type=f"{c.model_type}_vision")
    hidden, out = text.count("hidden_size"), tower.count("output_channels")

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    t.whole("@multi_modal_projector.conv_upsampler1.weight", 2 * out, out, 3, 3, why=CONVOLUTION)
    t.whole("@multi_modal_projector.conv_upsampler2.weight", hidden, 2 * out, 3, 3, why=CONVOLUTION)
    whole_projector(t, "@multi_modal_projector.multimodal_projector", hidden, hidden)
    return t


def _tower(c: Config) -> Table:
    hidden, count = c.count("hidden_size"), c.count("num_attention_heads")
    heads, size = Heads("heads", count, count), c.head_dim(count)
    ffn = Units("ffn", c.count("mlp_dim"), noun="feed-forward channels").each()
    patch, out = c.count("patch_size"), c.count("output_channels")
    side = c.count("image_size") // patch

    t = Table(c.count("num_hidden_layers"))
    t.tensor("@patch_embed.projection.weight", hidden, c.count("num_channels"), patch, patch, role="vision")
    t.tensor("@patch_embed.projection.bias", hidden, role="vision_bias")
    if c.flag("use_abs_pos", default=True):
        t.tensor("@pos_embed", 1, side, side, hidden, role="position")
    layer = "@layers.{layer}"
    qkv_bias = c.flag("qkv_bias", default=True)
    t.linear(f"{layer}.attn.qkv", heads.query(size) + heads.kv(size) * 2, hidden, role="qkv", bias=qkv_bias)
    t.linear(f"{layer}.attn.proj", hidden, heads.query(size), role="o", bias=True)
    if c.flag("use_rel_pos", default=True):
        for table in ("rel_pos_h", "rel_pos_w"):  # its length is the window's, or all of the image's
            t.tensor(f"{layer}.attn.{table}", None, size, role="position")
    mlp(t, f"{layer}.mlp", ffn, hidden, names=("lin1", "lin2"))
    norms(t, layer, ("layer_norm1", "layer_norm2"), hidden, bias=True)
    t.whole("@neck.conv1.weight", out, hidden, 1, 1, why=CONVOLUTION)
    t.whole("@neck.conv2.weight", out, out, 3, 3, why=CONVOLUTION)
    norms(t, "@neck", ("layer_norm1", "layer_norm2"), out, bias=True)
    return t
