"""T5 and its kin: mT5, UMT5, LongT5, Pop2Piano, and UDOP, which reads pages.

Source: transformers ``models/t5``, ``mt5``, ``umt5``, ``longt5``, ``pop2piano``, ``udop`` (``modeling_*.py``).
"""

from __future__ import annotations

from tpshard.blocks.encdec import lacks
from tpshard.blocks.t5 import RELATIVE, heads_of, is_gated, t5_mlp, t5_stack, vocabulary
from tpshard.config import Config
from tpshard.table import Table

FAMILY = "t5"
MODEL_TYPES = ("t5", "mt5", "umt5", "longt5", "pop2piano", "udop")

GATED = ("mt5", "umt5", "pop2piano")  # where the config does not say
UNTIED = ("pop2piano",)
ENCODERS = {"local": "Local", "transient-global": "TransientGlobal"}  # LongT5


def table(c: Config) -> Table:
    width, kind = c.count("d_model"), c.model_type
    mlp = t5_mlp(is_gated(c, "gated-gelu" if kind in GATED else "relu"), width)
    t = Table(0, prefixes=("", "transformer."))
    vocabulary(c, t, width, tied=kind not in UNTIED)
    encoder = ENCODERS[c.get("encoder_attention_type", default="local")] if kind == "longt5" else ""
    for side in ("encoder", "decoder"):
        t5_stack(c, t, side, mlp, every_layer=kind == "umt5", kind=encoder if side == "encoder" else "")
    if kind == "pop2piano":
        why = "one vector for every composer"
        t.whole("mel_conditioner.embedding.weight", None, width, why=why)
    if kind == "udop":
        _pages(c, t)
    return t


def _pages(c: Config, t: Table) -> None:
    """UDOP's patches, places on the page, and biases by how far they are apart, a column a head."""
    width, buckets = c.count("d_model"), c.count("relative_attention_num_buckets", default=32)
    size = c.get("patch_size", default=16)
    patch = (size, size) if isinstance(size, int) else tuple(size)
    channels, places = c.count("num_channels", default=3), c.count("max_2d_position_embeddings", default=1024)
    why = "makes vectors of patches, which every rank needs whole"
    for at, optional in (("patch_embed", False), ("encoder.embed_patches", True), ("decoder.embed_patches", True)):
        t.whole(f"@{at}.proj.weight", width, channels, *patch, why=why, optional=optional)
        t.whole(f"@{at}.proj.bias", width, why=why, optional=optional)
    for side in ("x", "y"):
        at = f"@encoder.cell_2d_embedding.{side}_position_embeddings.weight"
        t.whole(at, places, width, why="places on the page, added to every token")
    tables = len(c.get("relative_bias_args", default=(1, 2, 3)))
    first = f"@encoder.block.0.layer.0.SelfAttention.{RELATIVE}.weight"
    for side in ("encoder", "decoder"):
        for number in range(tables):
            name = f"@{side}.relative_bias.biases.{number}.{RELATIVE}.weight"
            lacks_one = number == 0 or (side == "decoder" and lacks(c, "decoder"))
            t.tensor(name, buckets, heads_of(c).query(1), role="attn_head", optional=lacks_one)
        t.tie(f"@{side}.relative_bias.biases.0.{RELATIVE}.weight", first)
